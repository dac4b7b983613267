import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import TextError
from shoal.text.clean import check_spoken_length, check_text, clean_text
from shoal.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  Hello. \n", "Hello."),
        ("It’s ‘fine’", "It's 'fine'"),
        ("Good 😀🌍🚀🇩🇪 day", "Good  day"),
        ("one,, two,,,,three", "one, two,three"),
        ("a,😀,b", "a,b"),
        ("👍🏽 yes ❤️", "yes ❤"),
        ("👩‍👩‍👧 family", "family"),
        ("zero\u200bwidth so\u00adft \ufeffmark \u202ertl\u202c", "zerowidth soft mark rtl"),
        ("bell\x07 nul\x00 del\x7f", "bell nul del"),
        ("keep\ttabs\nand lines", "keep\ttabs\nand lines"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("“double” quotes stay", "“double” quotes stay"),
        ("e\u0301 stays apart", "e\u0301 stays apart"),
        ("🤖 is outside the ranges of training", "🤖 is outside the ranges of training"),
    ],
)
def test_text_is_cleaned_as_in_training(text: str, cleaned: str) -> None:
    assert clean_text(text) == cleaned


@settings(deadline=None)
@given(st.text() | st.text(",‘’😀\u200b\u200da \n"))
def test_cleaning_twice_changes_nothing(text: str) -> None:
    assert clean_text(clean_text(text)) == clean_text(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty"),
        (" \n\t\u3000", "the text is empty"),
        ("?! ... —", "nothing to speak"),
        ("\u200b", "nothing to speak"),
        ("🤖", "nothing to speak"),
        ("<|speaker:0|> ...", "nothing to speak"),
        ("a" * 101, "the text has 101 characters, the limit is 100"),
        ("a\ud800", "lone surrogate at character 1"),
    ],
)
def test_text_that_cannot_be_spoken_is_refused(text: str, message: str) -> None:
    with pytest.raises(TextError, match=message):
        check_text(text, max_characters=100)


@pytest.mark.parametrize("text", ["a", "7", "你", "(laughing)", "<|speaker:0|>Hi", "a" * 100])
def test_text_that_can_be_spoken_passes(text: str, s1_tokenizer: Tokenizer) -> None:
    check_text(text, max_characters=100, tokenizer=s1_tokenizer)


def test_a_control_token_hidden_by_an_invisible_character_is_found_after_cleaning(s1_tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="im_end"):
        check_text(clean_text("Hi <|im_\u200bend|>"), max_characters=100, tokenizer=s1_tokenizer)


def test_words_for_signs_may_make_a_text_four_times_as_long() -> None:
    check_spoken_length("a" * 400, max_characters=100)
    with pytest.raises(TextError, match="401 characters with its numbers and symbols spelled out, the limit is 400"):
        check_spoken_length("a" * 401, max_characters=100)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("unit", [",", "\u200d", "😀", "<|", "<|speaker:", " ", "\x00", "’", ", ", "\u200da"])
def test_long_runs_of_anything_are_cleaned_and_checked_in_bounded_time(unit: str, s2_tokenizer: Tokenizer) -> None:
    text = clean_text(unit * (200_000 // len(unit)) + "a")
    check_text(text, max_characters=300_000, tokenizer=s2_tokenizer)
