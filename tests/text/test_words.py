import re

from hypothesis import given
from hypothesis import strategies as st

from shoal.speech import Pronunciation, SpeechRequest
from shoal.text.lexicon import Lexicon
from shoal.text.plan import TextRules, plan_text, word_reading
from shoal.text.words import match_words, spoken_words, written_words

ENGLISH = TextRules(english_words=True, sentence_turns=True, chunk_bytes=90)


def owned(text: str, request: SpeechRequest | None = None) -> dict[str, str]:
    """Return what each written word of a text is spoken as."""
    request = request or SpeechRequest(text)
    spoken = [word.text for turn in plan_text(request, ENGLISH).turns for word in spoken_words(turn.text)]
    written = [word.text for word in written_words(text, ssml=text.startswith("<speak"))]
    found: dict[str, list[str]] = {word: [] for word in written}
    for word, owner in zip(spoken, match_words(written, spoken, word_reading(request, ENGLISH, None)), strict=True):
        if owner is not None:
            found[written[owner]].append(word)
    return {word: " ".join(readings) for word, readings in found.items()}


def test_what_is_spelled_out_belongs_to_the_word_as_it_was_written() -> None:
    assert owned('Dr. Smith paid $12.50 for 3 "books" & left.') == {
        "Dr.": "Doctor",
        "Smith": "Smith",
        "paid": "paid",
        "$12.50": "twelve dollars and fifty cents",
        "for": "for",
        "3": "three",
        '"books"': "books",
        "&": "and",
        "left.": "left",
    }


def test_words_that_read_differently_in_context_are_divided_between_the_matches_around_them() -> None:
    assert owned("On March 5, 2024 we left.") == {
        "On": "On",
        "March": "March",
        "5,": "fifth",
        "2024": "twenty twenty-four",
        "we": "we",
        "left.": "left",
    }


def test_markup_is_no_word() -> None:
    assert owned("Wait. [pause:1s] [whisper] Go (laughing) now.") == {"Wait.": "Wait", "Go": "Go", "now.": "now"}
    assert owned('<speak>One <sub alias="World Wide Web">WWW</sub> two.</speak>') == {
        "One": "One",
        "WWW": "World Wide Web",
        "two.": "two",
    }


def test_the_label_of_a_link_is_words_and_its_address_is_not() -> None:
    text = 'See ![the new](map.png "a map") and [our docs](https://example.com/x), <b>both</b> <https://e.org>.'
    assert list(owned(text)) == ["See", "the", "new", "and", "our", "docs", ",", "both", "<https://e.org>."]
    assert owned(text)["docs"] == "docs"
    assert owned(text)["<https://e.org>."]
    assert all(text[word.first : word.last] == word.text for word in written_words(text))


def test_every_spoken_word_belongs_to_a_written_one() -> None:
    assert owned("C++ and #tides cost $1.5 million — if 5 > 3.") == {
        "C++": "see plus plus",
        "and": "and",
        "#tides": "hashtag tides",
        "cost": "cost",
        "$1.5": "one point five",
        "million": "million dollars",
        "—": "",
        "if": "if",
        "5": "five",
        ">": "is greater than",
        "3.": "three",
    }
    assert owned("He paid $2.5 million.")["million."] == "million dollars"


def test_a_respelled_word_keeps_its_spelling() -> None:
    text = "Ask Nguyen today."
    request = SpeechRequest(text, lexicon=(Pronunciation("Nguyen", "win noon"),))
    assert owned(text, request)["Nguyen"] == "win noon"
    assert Lexicon(request.lexicon) is not None


def test_positions_are_those_of_the_text() -> None:
    text = "  Über 50% — [pause:1s] 你好，世界。"
    words = written_words(text)
    assert [word.text for word in words] == ["Über", "50%", "—", "你", "好，", "世", "界。"]
    assert all(text[word.first : word.last] == word.text for word in words)
    assert [word.text for word in spoken_words("<|speaker:1|>你好，世界。 (sad) Oh!")] == ["你", "好", "世", "界", "Oh"]


def test_a_long_text_without_any_match_takes_linear_time() -> None:
    calls = 0

    def reading(word: str) -> list[str]:
        nonlocal calls
        calls += 1
        return [word]

    owners = match_words(["a"] * 3_000, ["b"] * 3_000, reading)
    assert len(owners) == 3_000
    assert calls == 1  # readings are kept


@given(st.lists(st.sampled_from(["tide", "5", "the", "$3.20", "a", "NASA", "--", "don't", "3/4"]), max_size=40))
def test_every_spoken_word_belongs_to_at_most_one_written_word_in_order(words: list[str]) -> None:
    spoken = re.findall(r"[A-Za-z']+", " ".join(words).replace("5", "five").replace("3", "three"))
    owners = match_words(words, spoken, lambda word: [word])
    known = [owner for owner in owners if owner is not None]
    assert len(owners) == len(spoken)
    assert known == sorted(known)
    assert all(0 <= owner < len(words) for owner in known)
