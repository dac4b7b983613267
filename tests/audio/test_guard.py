import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.audio.guard import (
    GuardThresholds,
    SpeechDefect,
    SpeechGuard,
    check_speech,
    duration_bounds,
    reading_seconds,
    shortest_seconds,
)

RATE = 44_100
SENTENCE = "The quick brown fox jumps over the lazy dog."


def test_speech_of_the_right_length_is_speech(speech):
    assert check_speech(speech(3.0), RATE, SENTENCE) == ()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_values_that_are_not_finite_are_found_and_nothing_else_is_claimed(speech, poison):
    samples = speech(3.0)
    samples[5] = poison
    assert check_speech(samples, RATE, SENTENCE) == (SpeechDefect.NOT_FINITE,)


def test_clipping_is_found_by_its_share(speech):
    samples = speech(3.0)
    samples[:100] = 1.0
    assert check_speech(samples, RATE, SENTENCE) == ()
    assert check_speech(np.clip(20 * speech(3.0), -1, 1), RATE, SENTENCE) == (SpeechDefect.CLIPPED,)


def test_silence_is_found(speech):
    assert check_speech(np.zeros(3 * RATE, np.float32), RATE, SENTENCE) == (SpeechDefect.SILENT,)
    assert check_speech(np.float32(1e-4) * speech(3.0), RATE, SENTENCE) == (SpeechDefect.SILENT,)


def test_a_pause_in_the_middle_is_not_silence(speech):
    samples = speech(3.0)
    samples[RATE : 2 * RATE] = 0
    assert check_speech(samples, RATE, SENTENCE) == ()


def test_speech_too_short_for_its_text_is_found(speech):
    assert check_speech(speech(0.3), RATE, SENTENCE) == (SpeechDefect.TOO_SHORT,)


def test_no_samples_are_too_short_and_silent():
    assert check_speech(np.zeros(0, np.float32), RATE, SENTENCE) == (SpeechDefect.TOO_SHORT, SpeechDefect.SILENT)


def test_runaway_speech_is_found_while_it_streams(speech):
    guard = SpeechGuard(RATE, "Hello.")
    findings = [guard.feed(speech(1.0)) for _ in range(7)]
    assert findings[:5] == [None] * 5
    assert findings[-1] is SpeechDefect.RUNAWAY
    assert guard.finish() == (SpeechDefect.RUNAWAY,)


def test_a_value_that_is_not_finite_is_reported_at_once_and_stays_reported(speech):
    guard = SpeechGuard(RATE, SENTENCE)
    assert guard.feed(speech(0.1)) is None
    assert guard.feed(np.array([np.nan], np.float32)) is SpeechDefect.NOT_FINITE
    assert guard.feed(speech(0.1)) is SpeechDefect.NOT_FINITE


def test_without_a_text_the_length_is_not_judged(speech):
    assert check_speech(speech(0.1), RATE) == ()
    assert check_speech(speech(60.0, 8_000), 8_000) == ()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (SENTENCE, 2.3),
        ("今天天气很好，我们去公园散步吧。", 3.1),
        ("こんにちは、元気ですか。", 2.2),
        ("안녕하세요 만나서 반갑습니다", 2.9),
        ("Call 0171 555 1234.", 3.0),
        ("สวัสดีครับ", 0.7),
        ("... !? —", 0.0),
    ],
)
def test_reading_time_follows_the_script(text, seconds):
    assert reading_seconds(text) == pytest.approx(seconds, abs=0.3)


def test_markers_allow_time_and_demand_none():
    plain, marked = (
        duration_bounds("Hello there."),
        duration_bounds("(laughing) [long pause] <|speaker:0|> Hello there."),
    )
    assert marked.min_seconds == plain.min_seconds
    assert marked.max_seconds > plain.max_seconds + 6


@pytest.mark.parametrize("text", ["", "Hi.", "好", SENTENCE, SENTENCE * 100, "(sighing)"])
def test_an_ordinary_reading_is_within_the_bounds(text):
    span = duration_bounds(text)
    for pace in (0.6, 1.0, 2.0):
        assert span.min_seconds <= pace * reading_seconds(text) + 0.3 <= span.max_seconds


def test_thresholds_can_be_chosen(speech):
    strict = GuardThresholds(silence_rms=0.9, max_reading_factor=1.0, slack_seconds=0.0)
    assert check_speech(speech(3.0), RATE, SENTENCE, strict) == (SpeechDefect.RUNAWAY, SpeechDefect.SILENT)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 60_000), max_size=6), gain=st.sampled_from([0.0, 1e-4, 1.0, 20.0]))
def test_findings_do_not_depend_on_the_pieces(speech, cuts, gain):
    samples = np.clip(np.float32(gain) * speech(3.0), -1, 1)
    guard = SpeechGuard(RATE, SENTENCE)
    for piece in np.split(samples, np.cumsum(cuts)):
        guard.feed(piece)
    assert guard.finish() == check_speech(samples, RATE, SENTENCE)


def test_the_shortest_plausible_turn_follows_the_text_and_the_voice() -> None:
    assert shortest_seconds("Hello there.", 0.6) == pytest.approx(0.6 * (10 / 15 + 0.25))
    assert shortest_seconds("Hello there.", 0.6, pace=0.5) < shortest_seconds("Hello there.", 0.6)
    assert shortest_seconds("(laughing) ...", 0.6) == 0.0
