"""Loudness normalization of whole files and of streams."""

import numpy as np
import pytest

from shoal.audio.loudness import MAX_PEAK, MAX_SLEW, TARGET_LUFS, LoudnessNormalizer
from shoal.speech import Samples

RATE = 16_000


def tone(seconds: float, level: float) -> Samples:
    """A tone of 997 Hz, whose loudness in LUFS is its level in dBFS minus 3 (BS.1770: mono, sine)."""
    at = np.arange(round(seconds * RATE)) / RATE
    return (10 ** (level / 20) * np.sin(2 * np.pi * 997 * at)).astype(np.float32)


def level(samples: Samples) -> float:
    """Return the level in dBFS of a sine."""
    return 20 * float(np.log10(np.abs(samples).max()))


@pytest.mark.parametrize("given", [-30.0, -20.0, -6.0])
def test_a_whole_file_reaches_the_target_with_one_gain(given: float) -> None:
    samples = tone(2.0, given)
    normalized = LoudnessNormalizer(RATE).feed(samples)
    assert level(normalized) == pytest.approx(TARGET_LUFS + 3, abs=0.2)
    loud = np.abs(samples) > np.abs(samples).max() / 2
    assert np.ptp(normalized[loud] / samples[loud]) < 1e-3


def test_a_stream_reaches_the_target_gradually_and_without_delay() -> None:
    normalizer, samples = LoudnessNormalizer(RATE), tone(6.0, -30.0)
    pieces = [normalizer.feed(piece) for piece in np.array_split(samples, 75)]  # 80 ms each
    assert sum(map(len, pieces)) == len(samples)
    assert level(pieces[0]) == pytest.approx(-30.0, abs=0.1)
    assert level(pieces[-1]) == pytest.approx(TARGET_LUFS + 3, abs=0.3)
    steps = sorted(abs(np.diff([level(piece) for piece in pieces])))
    assert steps[-2] <= MAX_SLEW * 0.08 + 0.01, "after the first measurement the gain changes gradually"


def test_peaks_stay_below_full_scale_and_silence_stays_silent() -> None:
    samples = tone(2.0, -40.0)
    samples[RATE] = 0.9
    assert np.abs(LoudnessNormalizer(RATE).feed(samples)).max() <= MAX_PEAK + 1e-6
    silence = np.zeros(RATE, np.float32)
    assert not LoudnessNormalizer(RATE).feed(silence).any()
    assert not LoudnessNormalizer(RATE).feed(np.zeros(0, np.float32)).size
