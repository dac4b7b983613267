import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.text_corpus import (
    FILLERS,
    HELDOUT,
    HELDOUT_WORDS,
    MAX_CHARACTERS,
    TEMPLATES,
    Synset,
    TextCorpus,
    heldout_key,
    is_plain,
    main,
    make_corpus,
    normalise,
    number_words,
    ordinal_words,
    parse_synset,
    read_sentences,
    templates,
    words_of,
    year_words,
)

SYNSET = (
    "00005678 03 n 02 ice_cream 0 gelato(p) 1 001 @ 00001740 n 0000 | frozen dessert (often sweet); made with 2 eggs; "
    '"she ate ice cream"; "a rose is a rose"- Somebody Famous; "ice cream in the 1920s"  '
)


def synsets() -> list[Synset]:
    examples = tuple(f"she met the {noun} {verb} the old house" for noun in NOUNS for verb in VERBS)
    return [parse_synset(SYNSET), Synset(("dog",), ("a loyal animal",), examples)]


@pytest.fixture(scope="module")
def corpus() -> TextCorpus:
    return make_corpus(synsets())


@pytest.fixture
def few_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill each template a hundredth as often."""
    monkeypatch.setattr(templates, "TEMPLATES", [(text, count // 100) for text, count in TEMPLATES])


NOUNS = [
    f"{a}{b}" for a in ("bold", "calm", "dark", "kind", "warm") for b in ("man", "cat", "fox", "king", "bird", "son")
]
VERBS = [
    f"{a}ing {b}" for a in ("paint", "find", "sell", "clean") for b in ("behind", "near", "before", "outside", "in")
]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (21, "twenty-one"),
        (110, "one hundred ten"),
        (4_000, "four thousand"),
        (1_000_305, "one million three hundred five"),
    ],
)
def test_numbers_are_read_as_words(number: int, words: str) -> None:
    assert number_words(number) == words


def test_british_numbers_join_with_and() -> None:
    assert number_words(2_345, " and ") == "two thousand three hundred and forty-five"


@pytest.mark.parametrize(
    ("number", "words"),
    [(1, "first"), (12, "twelfth"), (20, "twentieth"), (31, "thirty-first"), (100, "one hundredth")],
)
def test_ordinals_end_as_they_should(number: int, words: str) -> None:
    assert ordinal_words(number) == words


@pytest.mark.parametrize(
    ("year", "words"),
    [
        (1905, "nineteen oh five"),
        (1900, "nineteen hundred"),
        (2006, "two thousand six"),
        (2026, "twenty twenty-six"),
        (1984, "nineteen eighty-four"),
    ],
)
def test_years_are_read_in_pairs(year: int, words: str) -> None:
    assert year_words(year) == words


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("fruits, e.g. apples", "fruits, for example apples"),
        ("Dr. Brown paid $20 (or so)", "Doctor Brown paid twenty dollars"),
        ("about 50% of 1,200 people", "about fifty percent of one thousand two hundred people"),
        ("born in 1871 , died later", "born in eighteen seventy-one, died later"),
        ("the 19th century -- the 1890s", "the nineteenth century, the eighteen nineties"),
        ("3.5 miles away", "three point five miles away"),
        ("at five o'clock", "at five o'clock"),
        ("I don't know", "I don't know"),
        ("from 1914-1918", "from nineteen fourteen to nineteen eighteen"),
        ("A dog; a cat;", "A dog; a cat"),
    ],
)
def test_written_forms_become_spoken_words(written: str, spoken: str) -> None:
    assert normalise(written) == spoken


@pytest.mark.parametrize(
    "text", ["the FBI", "J. Smith came", "x = y", "CO2", "10:30", "a\u00e7a\u00ed", "", "?!", "and/or"]
)
def test_text_with_more_than_one_reading_is_refused(text: str) -> None:
    assert normalise(text) is None


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=200))
def test_whatever_is_accepted_is_plain_and_stays_as_it_is(text: str) -> None:
    spoken = normalise(text)
    if spoken is not None:
        assert is_plain(spoken)
        assert not re.search(r"[^A-Za-z .,?!'\"\-;:]", spoken)
        assert normalise(spoken) in (spoken, None)


def test_a_synset_gives_words_definitions_and_examples_without_quotations() -> None:
    synset = parse_synset(SYNSET)
    assert synset.lemmas == ("ice cream", "gelato")
    assert synset.definitions == ("frozen dessert (often sweet)", "made with 2 eggs")
    assert synset.examples == ("she ate ice cream", "ice cream in the 1920s")


def test_every_slot_of_every_template_has_a_filler() -> None:
    slots = {slot for templates, _ in TEMPLATES for slot in re.findall(r"\{(\w+)\}", templates)}
    assert slots == set(FILLERS)


def test_every_sentence_is_plain_and_unlike_the_others(corpus: TextCorpus) -> None:
    assert all(map(is_plain, corpus.training))
    assert max(map(len, corpus.training)) <= MAX_CHARACTERS
    assert len(set(corpus.training)) == len(corpus.training)


def test_wordnet_and_templates_are_both_there(corpus: TextCorpus) -> None:
    assert any(text.lower().startswith("a loyal animal") for text in corpus.training)
    assert len(corpus.training) > 50_000


def test_no_heldout_sentence_is_trained_on(corpus: TextCorpus) -> None:
    trained = {heldout_key(text) for text in corpus.training}
    assert not trained & {heldout_key(text) for text in corpus.heldout}


def test_heldout_sentences_are_everyday_ones_of_ordinary_length(corpus: TextCorpus) -> None:
    own = HELDOUT.splitlines()
    assert corpus.heldout[: len(own)] == own
    assert len(own) >= 150
    assert [text for text in corpus.heldout if len(words_of(text)) not in HELDOUT_WORDS or not is_plain(text)] == []


@pytest.mark.usefixtures("few_sentences")
def test_the_seed_decides_the_corpus() -> None:
    corpus, again, other = (make_corpus(synsets(), seed) for seed in (0, 0, 1))
    assert len(corpus.training) > 2_000
    assert corpus == again
    assert corpus.training != other.training


@pytest.mark.usefixtures("few_sentences")
def test_the_command_writes_both_sets_and_reads_them_back(tmp_path: Path) -> None:
    for part in ("noun", "verb", "adj", "adv"):
        (tmp_path / f"data.{part}").write_text(f"  1 licence text\n{SYNSET}\n")
    main(["--out", str(tmp_path / "text" / "sentences.txt.gz"), "--wordnet", str(tmp_path)])
    assert "She ate ice cream." in read_sentences(tmp_path / "text" / "sentences.txt.gz")
    assert read_sentences(tmp_path / "text" / "heldout.txt")[: len(HELDOUT.splitlines())] == HELDOUT.splitlines()
