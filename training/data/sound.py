"""From what a teacher says to what a shard holds: formants, silence, level, whole frames."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shoal.audio.wav import wav_header

SAMPLE_RATE = 16_000
FRAME = 640  # samples per codec frame, 25 frames a second
LEAD_SECONDS, TAIL_SECONDS = 0.060, 0.150
SILENCE_FLOOR = 0.02  # of the utterance's peak: below it is silence, above it is speech
TARGET_RMS, PEAK_LIMIT = 0.10, 0.97
# Slower or faster than this and the teacher dropped words or stumbled; such an utterance would teach a wrong text.
PLAUSIBLE_SECONDS_PER_CHARACTER = (0.025, 0.30)
Samples = NDArray[np.int16]
Signal = NDArray[np.float64]


def scale_formants(speech: Signal, factor: float) -> Signal:
    """Speech with all frequencies times `factor`, and hence 1/factor times as long."""
    if factor == 1.0:
        return speech
    from scipy.signal import resample_poly  # type: ignore[import-untyped]  # a second to import, needed only here

    down = round(100 * factor)
    common = math.gcd(100, down)
    return np.asarray(resample_poly(speech, 100 // common, down // common), dtype=np.float64)


def trim(speech: Signal) -> Signal:
    """Speech with exactly the lead and tail of silence we want, whatever the teacher left around it."""
    loud = np.flatnonzero(np.abs(speech) > SILENCE_FLOOR * np.abs(speech).max(initial=0.0))
    if not loud.size:
        return speech[:0]
    lead, tail = round(LEAD_SECONDS * SAMPLE_RATE), round(TAIL_SECONDS * SAMPLE_RATE)
    start, end = loud[0] - lead, loud[-1] + 1 + tail
    inside = speech[max(start, 0) : end]
    return np.pad(inside, (max(-start, 0), max(end - speech.size, 0)))


def level(speech: Signal) -> Signal:
    """Speech whose active samples have the target RMS, or as near to it as the peak limit allows."""
    peak = float(np.abs(speech).max(initial=0.0))
    if not peak:
        return speech
    active = speech[np.abs(speech) > SILENCE_FLOOR * peak]
    gain = TARGET_RMS / float(np.sqrt(np.mean(active**2)))
    return speech * min(gain, PEAK_LIMIT / peak)


def whole_frames(speech: Signal) -> Signal:
    return np.pad(speech, (0, -speech.size % FRAME))


def to_int16(speech: Signal) -> Samples:
    return np.clip(np.rint(speech * 32767), -32768, 32767).astype(np.int16)


def plausible(text: str, samples: int) -> bool:
    """Whether speech of this length can be this text."""
    low, high = PLAUSIBLE_SECONDS_PER_CHARACTER
    seconds = samples / SAMPLE_RATE - LEAD_SECONDS - TAIL_SECONDS
    return low * len(text) < seconds < 1.0 + high * len(text)


def wav_bytes(samples: Samples, sample_rate: int) -> bytes:
    """Return a wav file of one channel."""
    content = samples.astype("<i2").tobytes()
    return wav_header(sample_rate, len(content)) + content
