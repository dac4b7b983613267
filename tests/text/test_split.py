import json
import re
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import InvalidRequest
from shoal.text.split import split_dialogue, split_sentences, split_text
from tests.cpu_limit import cpu_limit

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "prompts" / "cases.json").read_text())

# Speaker turns


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_batches_equal_those_of_upstream_where_upstream_loses_nothing(case: dict[str, object]) -> None:
    if case["name"] != "lead_in_dropped_by_s2":
        assert split_dialogue(str(case["text"]), int(str(case["chunk_length"]))) == case["s2_batches"]


def test_words_before_the_first_tag_are_spoken_by_speaker_0() -> None:
    text = "A preface. <|speaker:1|>Hello."
    assert split_dialogue(text, 300) == ["<|speaker:0|>A preface.\n<|speaker:1|>Hello."]
    assert split_dialogue(text, 300, drop_lead_in=True) == ["<|speaker:1|>Hello."]


def test_a_tag_without_words_makes_no_turn() -> None:
    assert split_dialogue("<|speaker:0|> <|speaker:1|>Hi.<|speaker:0|>", 300) == ["<|speaker:1|>Hi."]


def test_turn_sizes_are_counted_in_bytes() -> None:
    turns = ["<|speaker:0|>你好", "<|speaker:1|>你好"]
    assert split_dialogue("".join(turns), 38) == ["\n".join(turns)]
    assert split_dialogue("".join(turns), 37) == turns


# Prose


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("One here. Two here! Three here?", ["One here.", "Two here!", "Three here?"]),
        ("Dr. Who met Mr. J. R. Hartley. He left.", ["Dr. Who met Mr. J. R. Hartley.", "He left."]),
        ("It cost 3.50 in the U.S. last year. Fine.", ["It cost 3.50 in the U.S. last year.", "Fine."]),
        ("Use e.g. a hammer, i.e. a tool. Done.", ["Use e.g. a hammer, i.e. a tool.", "Done."]),
        ("See No. 5 and Fig. 3 on p. 12. I said no. Go.", ["See No. 5 and Fig. 3 on p. 12.", "I said no. Go."]),
        ("Wait... what is it... Nobody knows it.", ["Wait... what is it...", "Nobody knows it."]),
        ("Wait… what is it… Nobody knows it.", ["Wait… what is it…", "Nobody knows it."]),
        ('"Is it you?" he asked her. "It is me."', ['"Is it you?" he asked her.', '"It is me."']),
        ("Say it now.) Then (he did say.)", ["Say it now.)", "Then (he did say.)"]),
        ("It is a list. 1. First item. 2. Second item.", ["It is a list. 1. First item.", "2. Second item."]),
        ("all in lower case. no capitals. at all.", ["all in lower case.", "no capitals. at all."]),
        ("你好，世界！我们今天去公园。好不好？", ["你好，世界！", "我们今天去公园。好不好？"]),
        ("「本当ですか？」そうです。", ["「本当ですか？」", "そうです。"]),
        ("Heading one\n\nThe body of it", ["Heading one", "The body of it"]),
        ("क्या हाल है। मैं ठीक हूँ।", ["क्या हाल है।", "मैं ठीक हूँ।"]),
    ],
)  # fmt: skip
def test_text_is_cut_at_the_ends_of_sentences(text: str, pieces: list[str]) -> None:
    assert split_text(text, max(len(piece.encode()) for piece in pieces)) == pieces


def test_short_sentences_are_merged_up_to_the_limit() -> None:
    assert split_text("One. Two. Three. Four.", 10) == ["One. Two.", "Three.", "Four."]
    assert split_text("One. Two. Three. Four.", 100) == ["One. Two. Three. Four."]


def test_a_long_sentence_is_cut_at_clause_marks_then_at_spaces() -> None:
    assert split_text("a long clause here, and more of it; the rest", 20) == [
        "a long clause here,",
        "and more of it;",
        "the rest",
    ]
    assert split_text("one two three four five", 9) == ["one two", "three", "four five"]
    assert split_text("first verse\nsecond verse", 14) == ["first verse", "second verse"]


def test_a_word_longer_than_a_piece_is_cut_between_visible_characters() -> None:
    assert split_text("abcdefgh", 3) == ["abc", "def", "gh"]
    assert split_text("e\u0301e\u0301e\u0301", 4) == ["e\u0301", "e\u0301", "e\u0301"]
    assert split_text("👩‍👩‍👧a👍🏽b", 20) == ["👩‍👩‍👧a", "👍🏽b"]  # fmt: skip


@pytest.mark.parametrize("whole", ["3.14159", "1,234,567.89", "12:30", "2024-03-14", "$1,000", "15 000", "50%", "10km"])
def test_a_number_is_never_cut(whole: str) -> None:
    assert any(whole in piece for piece in split_text(f"word {whole} word", 4))


@pytest.mark.parametrize("whole", ["(in a hurry tone)", "[short pause]", "<|speaker:12|>", "[laughing. Loudly, a lot]"])
def test_a_marker_or_speaker_tag_is_never_cut(whole: str) -> None:
    assert any(whole in piece for piece in split_text(f"word {whole} word", 4))


def test_a_marker_stays_with_the_words_after_it() -> None:
    assert split_text("Hello there. (sad) I am sad.", 20) == ["Hello there.", "(sad) I am sad."]
    assert split_text("Hello there <|speaker:1|> yes I am", 24) == ["Hello there", "<|speaker:1|> yes I am"]


def test_marks_without_words_go_with_their_neighbours() -> None:
    assert split_text("Hello there. !!! ...", 12) == ["Hello there. !!! ..."]
    assert split_text("... --- Hello", 5) == ["... --- Hello"]
    assert split_text("... ---", 3) == ["... ---"]


def test_text_of_whitespace_has_no_pieces() -> None:
    assert split_text(" \n\t ", 10) == []
    assert split_text("", 10) == []


def test_a_limit_that_holds_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="0 bytes"):
        split_text("Hello", 0)


WHOLES = ("3.14", "1,000,000", "12:30", "(whispering)", "[low voice]", "<|speaker:1|>")
PARTS = st.sampled_from(
    (*WHOLES, "Mr.", "e.g.", "...", "!", "?", ".", ",", "“", "”", "(", "]", "\n", "\n\n", "你好", "。", "，")
)
TEXTS = st.lists(PARTS | st.text(max_size=8) | st.text("ab é", max_size=20), max_size=30).map(" ".join)
LIMITS = st.integers(1, 80)


@settings(deadline=None)
@given(text=TEXTS, limit=LIMITS)
def test_the_pieces_joined_give_the_text_again_up_to_whitespace(text: str, limit: int) -> None:
    assert "".join("".join(split_text(text, limit)).split()) == "".join(text.split())


@settings(deadline=None)
@given(parts=st.lists(st.sampled_from(WHOLES) | st.text("abc.,!", min_size=1, max_size=9), max_size=20), limit=LIMITS)
def test_numbers_markers_and_tags_come_out_whole(parts: list[str], limit: int) -> None:
    pieces = split_text(" ".join(parts), limit)
    for whole in WHOLES:
        assert sum(piece.count(whole) for piece in pieces) == " ".join(parts).count(whole)


@settings(deadline=None)
@given(text=TEXTS, limit=LIMITS)
def test_every_piece_of_a_text_with_words_has_a_word(text: str, limit: int) -> None:
    pieces = split_text(text, limit)
    if any(map(str.isalnum, text)):
        assert all(any(map(str.isalnum, piece)) for piece in pieces)


@settings(deadline=None)
@given(words=st.lists(st.text("abcé你", min_size=1, max_size=30), min_size=1), limit=st.integers(3, 80))
def test_pieces_of_plain_words_keep_to_the_limit(words: list[str], limit: int) -> None:
    assert all(len(piece.encode()) <= limit for piece in split_text(" ".join(words), limit))


@settings(deadline=None)
@given(text=st.text("e\u0301🇩🇪👍🏽\u200d한각", max_size=60), limit=st.integers(1, 40))
def test_no_visible_character_is_cut(text: str, limit: int) -> None:
    edges = {match.start() for match in regex.finditer(r"\X", text)} | {len(text)}
    place = 0
    for piece in split_text(text, limit):
        assert place in edges
        place += len(piece)


HOSTILE = ("(", "[a] ", ". ", "1", "1,", "1 000 ", "<|speaker:", "你", "\u0301", " ", "Mr. ", '"', "(a", "\n", "a。")


@pytest.mark.parametrize("unit", HOSTILE)
def test_long_runs_of_anything_are_split_in_bounded_time(unit: str) -> None:
    with cpu_limit(10):
        assert_splits(unit * (40_000 // len(unit.encode())))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("unit", ["a", "A sentence of words, 1.5 long. "])
def test_a_megabyte_is_split_in_bounded_time(unit: str) -> None:
    assert_splits(unit * (1_000_000 // len(unit)))


def assert_splits(text: str) -> None:
    pieces = split_text(text, 200)
    assert len("".join("".join(pieces).split())) == len("".join(text.split()))


@pytest.mark.timeout(240)
def test_a_long_wordless_beginning_does_not_slow_the_rest_down() -> None:
    text = "!" * 500_000 + " word" * 100_000
    assert len(split_text(text, 50)) == 10_000


@pytest.mark.timeout(240)
def test_a_megabyte_of_turns_is_grouped_in_linear_time() -> None:
    assert len(split_dialogue("<|speaker:1|>hi" * 70_000, 300)) == 14_000
    assert re.fullmatch(r"(<\|speaker:)+", split_dialogue("<|speaker:" * 100_000, 300)[0])


def test_sentences_never_share_a_turn_and_long_ones_are_cut() -> None:
    text = (
        "Stop! Who goes there? A friend, I hope. Good... Dr. No saw it, and he told Mr. Smith, who did not believe it."
    )
    assert split_sentences(text, 40) == [
        "Stop!",
        "Who goes there?",
        "A friend, I hope.",
        "Good...",
        "Dr. No saw it, and he told Mr. Smith,",
        "who did not believe it.",
    ]
    assert split_sentences("!! Hello. ... ", 40) == ["!! Hello. ..."]


def test_short_sentences_share_a_turn_with_the_next_one() -> None:
    assert split_sentences("Stop! Who goes there? Yes. A friend, I hope. No.", 40, 7) == [
        "Stop! Who goes there?",
        "Yes. A friend, I hope.",
        "No.",
    ]
    assert split_sentences("No. No. No. No. No.", 40, 7) == ["No. No. No. No.", "No."]
    assert split_sentences("Yes. The soup is cold and so is the bread.", 40, 7)[0] == "Yes."
    assert split_sentences("Good.", 40, 7) == ["Good."]
