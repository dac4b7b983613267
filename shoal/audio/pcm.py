"""Convert between integer PCM and float samples."""

import numpy as np
from numpy.typing import NDArray

from shoal.errors import GenerationFailed

Samples = NDArray[np.float32]


def to_int16(samples: Samples) -> NDArray[np.int16]:
    """Convert to little-endian 16-bit samples, clipped at full scale.

    Rounds to nearest: truncation would double the error. The scale is 32768, by which readers divide, so a round trip
    of 16-bit audio through floats is exact.
    """
    scaled: Samples = samples * np.float32(32768.0)
    np.rint(scaled, out=scaled)
    # In place, and without the checks of `clip`: an event loop calls this for every chunk.
    np.maximum(scaled, np.float32(-32768.0), out=scaled)
    np.minimum(scaled, np.float32(32767.0), out=scaled)
    return scaled.astype("<i2")


def to_float(pcm: NDArray[np.generic]) -> Samples:
    """Convert integers of any width, or floats, to float32 with full scale at 1.0."""
    if pcm.dtype.kind == "f":
        # A double out of float32's range becomes infinite here and is rejected later.
        with np.errstate(over="ignore"):
            return pcm.astype(np.float32)
    full_scale = np.float64(2.0 ** (8 * pcm.dtype.itemsize - 1))
    middle = full_scale if pcm.dtype.kind == "u" else np.float64(0.0)
    return ((pcm.astype(np.float64) - middle) / full_scale).astype(np.float32)


def speech_samples(samples: Samples) -> Samples:
    """Return float32 samples [n]. Raises ValueError for another shape, GenerationFailed for non-finite values."""
    mono = np.asarray(samples, dtype=np.float32)
    if mono.ndim != 1:
        raise ValueError(f"samples must be mono with one dimension, not shape {mono.shape}")
    if not np.isfinite(mono).all():
        raise GenerationFailed("the generated audio contains values that are not finite; it was not written")
    return mono
