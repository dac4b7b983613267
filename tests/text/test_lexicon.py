from pathlib import Path

import pytest

from shoal.errors import InvalidRequest, TextError
from shoal.speech import Pronunciation
from shoal.text.lexicon import Lexicon, parse_lexicon, pronunciation, read_lexicon
from shoal.text.phonemes import arpabet, possessive

LEXICON = Lexicon(
    [
        pronunciation("nginx", "engine x"),
        pronunciation("GIF", "/JH IH1 F/"),
        pronunciation("C++", "see plus plus"),
        pronunciation(".NET", "dot net"),
        pronunciation("new york", "noo york"),
        pronunciation("new york city", "the big apple"),
        pronunciation("Polish", "poe lish"),
        pronunciation("李", "li"),
    ]
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Nginx and NGINX.", "engine x and engine x."),
        ("nginx's config, nginx’s log, nginxs", "engine x's config, engine x’s log, nginxs"),
        ("A GIF, GIF's, a gif.", "A {JH IH1 F}, {JH IH1 F S}, a gif."),
        ("C++, not C+ or C.", "see plus plus, not C+ or C."),
        (".NET and ASP.NET", "dot net and ASP.NET"),
        ("New York City, New York's", "the big apple, noo york's"),
        ("Polish the Polish car; polish it", "poe lish the poe lish car; polish it"),
        ("小李子", "小li子"),
        ("{GIF} <|speaker:0|>GIF", "{GIF} <|speaker:0|>{JH IH1 F}"),
        ("İnginx nginx", "İnginx engine x"),
    ],
)
def test_words_are_replaced_by_their_readings(text: str, expected: str) -> None:
    text, expected = (
        each.replace("{", "<|phoneme_start|>").replace("}", "<|phoneme_end|>") for each in (text, expected)
    )
    assert LEXICON.apply(text, phonemes=True) == expected


def test_a_word_with_phonemes_only_is_an_error_for_a_model_that_reads_none() -> None:
    with pytest.raises(TextError, match="only phonemes for 'GIF', and this model reads none: add a respelling"):
        LEXICON.apply("A GIF.", phonemes=False)
    both = Lexicon([Pronunciation("GIF", "jif", "JH IH1 F")])
    assert both.apply("A GIF.", phonemes=False) == "A jif."


def test_a_base_lexicon_yields_to_the_entries_of_the_request() -> None:
    ours = Lexicon([pronunciation("nginx", "en jinx")], base=LEXICON)
    assert ours.apply("nginx on .NET", phonemes=True) == "en jinx on dot net"


TABLE = """\
# names of products
nginx = engine x
GIF\t/JH IH1 F/
tomato = /təˈmeɪtoʊ/
"""
PLS = """<?xml version="1.0" encoding="UTF-8"?>
<lexicon version="1.0" xmlns="http://www.w3.org/2005/01/pronunciation-lexicon" alphabet="ipa" xml:lang="en-US">
  <lexeme><grapheme>tomato</grapheme><grapheme>tomatoe</grapheme><phoneme>təˈmeɪtoʊ</phoneme></lexeme>
  <lexeme><grapheme>W3C</grapheme><alias>World Wide Web Consortium</alias></lexeme>
  <lexeme><grapheme>GIF</grapheme><phoneme alphabet="x-arpabet">JH IH1 F</phoneme><alias>jif</alias></lexeme>
</lexicon>
"""


def test_tables_and_pls_documents_are_read(tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text(TABLE)
    (tmp_path / "words.pls").write_text(PLS)
    assert read_lexicon(tmp_path / "table.txt").entries == {
        "nginx": Pronunciation("nginx", "engine x"),
        "GIF": Pronunciation("GIF", phonemes="JH IH1 F"),
        "tomato": Pronunciation("tomato", phonemes="T AH0 M EY1 T OW0"),
    }
    assert read_lexicon(tmp_path / "words.pls").entries == {
        "tomato": Pronunciation("tomato", phonemes="T AH0 M EY1 T OW0"),
        "tomatoe": Pronunciation("tomatoe", phonemes="T AH0 M EY1 T OW0"),
        "W3C": Pronunciation("W3C", "World Wide Web Consortium"),
        "GIF": Pronunciation("GIF", "jif", "JH IH1 F"),
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nginx engine x\n", "line 1: write `word = reading`"),
        ("# a\n\nGIF = /JH 9/\n", "line 3: '9' is not an Arpabet phoneme"),
        ("!! = bang\n", "line 1: '!!' is not a word"),
        ("word = " + "x" * 201, "line 1: 'word' needs a reading of 1 to 200 characters"),
        ("<lexicon><lexeme><grapheme>a</grapheme></lexeme></lexicon>", "PLS line 1, column 40: 'a' needs a reading"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><lexicon/>", "document types and entity declarations are not allowed"),
        ("<lexicon><foo/></lexicon>", "PLS line 1, column 10: <foo> is not supported"),
    ],
)
def test_problems_of_a_lexicon_are_named_with_their_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "lexicon"
    path.write_text(content)
    with pytest.raises(InvalidRequest) as raised:
        read_lexicon(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_all_problems_are_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "l").write_text("a\nb = c\nd\n")
    entries, problems = parse_lexicon(tmp_path / "l")
    assert (len(entries), len(problems)) == (1, 2)
    with pytest.raises(InvalidRequest, match="cannot read the lexicon"):
        read_lexicon(tmp_path / "missing")


@pytest.mark.parametrize(
    ("written", "alphabet", "expected"),
    [
        ("ˈɛndʒɪnɪər", "ipa", "EH1 N JH IH0 N IH0 R R"),
        ("rɛd", "ipa", "R EH0 D"),
        ("tʃɜːtʃ", "ipa", "CH ER0 CH"),
        ("r eh1 d", "arpabet", "R EH1 D"),
        ("/R EH1 D/", "", "R EH1 D"),
    ],
)
def test_phonemes_become_arpabet(written: str, alphabet: str, expected: str) -> None:
    assert arpabet(written, alphabet) == expected


def test_unknown_phonemes_and_alphabets_are_refused() -> None:
    for written, alphabet in (("XX", "arpabet"), ("R1", "arpabet"), ("a", "x-sampa"), ("", "ipa")):
        with pytest.raises(TextError):
            arpabet(written, alphabet)


def test_a_possessive_follows_the_last_sound() -> None:
    assert [possessive(word)[len(word) :] for word in ("B AH1 S", "K AE1 T", "D AO1 G")] == [" AH0 Z", " S", " Z"]
