"""Samples as numbers and as wav files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.audio.wav import wav_header

Samples = NDArray[np.int16]
Signal = NDArray[np.float64]


def to_int16(speech: Signal) -> Samples:
    return np.clip(np.rint(speech * 32767), -32768, 32767).astype(np.int16)


def wav_bytes(samples: Samples, sample_rate: int) -> bytes:
    """Return a wav file of one channel."""
    content = samples.astype("<i2").tobytes()
    return wav_header(sample_rate, len(content)) + content
