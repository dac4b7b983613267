"""A turn that stopped too early is divided at a word, and nothing of its text is lost."""

import pytest

from shoal.audio.guard import EDGE_SECONDS, reading_seconds
from shoal.engine.output.turn_repair import divide_text

TEXT = "Call me at noon, and bring the old red book."


def seconds_for(spoken: str, pace: float = 1.0) -> float:
    return EDGE_SECONDS + reading_seconds(spoken) * pace + 1e-6


@pytest.mark.parametrize("pace", [0.8, 1.3])
@pytest.mark.parametrize("words", range(1, 10))
def test_a_text_is_divided_after_the_words_that_were_spoken(words: int, pace: float) -> None:
    first, rest = TEXT.split()[:words], TEXT.split()[words:]
    assert divide_text(TEXT, seconds_for("".join(first), pace), pace) == (" ".join(first), " ".join(rest))


def test_a_word_that_was_spoken_in_part_is_spoken_again() -> None:
    assert divide_text(TEXT, seconds_for("Call me at no"), 1.0) == ("Call me at", "noon, and bring the old red book.")


@pytest.mark.parametrize("seconds", [0.0, EDGE_SECONDS, 60.0])
def test_there_is_no_rest_before_the_first_word_or_after_the_last(seconds: float) -> None:
    assert divide_text(TEXT, seconds, 1.0) is None


@pytest.mark.parametrize(
    ("text", "spoken", "rest"),
    [
        ("今天天气很好，我们去公园。", "今天天气很好，", "我们去公园。"),
        ("(in a hurry tone) Come on now.", "(in a hurry tone) Come", "on now."),
        ("Wait here [laughing nervously] for me.", "Wait here", "[laughing nervously] for me."),
        ("<|speaker:1|>Who goes there?", "<|speaker:1|>Who goes", "<|speaker:1|>there?"),
        ("<|speaker:1|>Who is it?\n<|speaker:0|>Me.", "<|speaker:1|>Who is it?", "<|speaker:0|>Me."),
        (
            "Read <|phoneme_start|>R EH1 D<|phoneme_end|> again.",
            "Read <|phoneme_start|>R EH1 D<|phoneme_end|>",
            "again.",
        ),
    ],
)
def test_tags_stay_whole_and_the_rest_keeps_its_speaker(text: str, spoken: str, rest: str) -> None:
    for seconds in range(20, 400):
        if (parts := divide_text(text, seconds / 100, 1.0)) == (spoken, rest):
            return
        assert parts is None or all(part.count("<|") == part.count("|>") for part in parts)
    pytest.fail(f"never divided before {rest!r}")
