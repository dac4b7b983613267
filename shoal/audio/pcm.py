"""Integers on the wire, floats inside."""

import numpy as np
from numpy.typing import NDArray

from shoal.errors import GenerationFailed

Samples = NDArray[np.float32]


def to_int16(samples: Samples) -> NDArray[np.int16]:
    """Little-endian 16-bit samples, clipped at full scale.

    Nearest, not truncated: truncation pulls every sample towards zero and doubles the error. The scale is 32768, the
    one readers divide by, so 16-bit audio survives a trip through floats unchanged.
    """
    nearest: Samples = np.rint(samples * np.float32(32768.0))
    return nearest.clip(-32768.0, 32767.0).astype("<i2")


def to_float(pcm: NDArray[np.generic]) -> Samples:
    """Integers of any width, or floats, as float32 with full scale at 1.0."""
    if pcm.dtype.kind == "f":
        # A double too large for float32 becomes an infinity here, and is refused as one later.
        with np.errstate(over="ignore"):
            return pcm.astype(np.float32)
    full_scale = np.float64(2.0 ** (8 * pcm.dtype.itemsize - 1))
    middle = full_scale if pcm.dtype.kind == "u" else np.float64(0.0)
    return ((pcm.astype(np.float64) - middle) / full_scale).astype(np.float32)


def speech_samples(samples: Samples) -> Samples:
    """The samples as every encoder wants them: one dimension, float32, finite; anything else is refused."""
    mono = np.asarray(samples, dtype=np.float32)
    if mono.ndim != 1:
        raise ValueError(f"samples are mono, one dimension; got shape {mono.shape}")
    if not np.isfinite(mono).all():
        raise GenerationFailed("The generated audio holds values that are not finite; it was not written.")
    return mono
