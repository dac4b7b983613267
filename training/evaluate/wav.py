"""Read WAV files and detect faults in their samples."""

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shoal.errors import AudioError
from training.judges import Samples

SHORTEST = 0.1
QUIETEST = 1e-3
FULL_SCALE = 0.9999
# One sample at full scale is a peak; several in a row are a peak cut off.
CLIPPED_RUN = 3


def read_wav(content: bytes) -> tuple[Samples, int]:
    """Return mono samples in [-1, 1] and their rate; reads 16-bit PCM and 32-bit float, which may contain NaN."""
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise AudioError("not a WAV file")
    chunks = dict(_chunks(content))
    if len(chunks.get(b"fmt ", b"")) < 16 or b"data" not in chunks:
        raise AudioError("a WAV file without format or samples")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunks[b"fmt "])
    kind = int.from_bytes(chunks[b"fmt "][24:26], "little") if kind == 0xFFFE else kind
    if (kind, bits) not in {(1, 16), (3, 32)} or not channels or not rate:
        raise AudioError(f"a WAV file of {bits} bits in format {kind}; 16-bit PCM or 32-bit float is read")
    data = chunks[b"data"]
    data = data[: len(data) // (channels * bits // 8) * (channels * bits // 8)]
    samples = np.frombuffer(data, "<i2").astype(np.float32) / 32768 if kind == 1 else np.frombuffer(data, "<f4")
    return samples.reshape(-1, channels).mean(1, dtype=np.float32), rate


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 12
    while at + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, at)
        yield name, content[at + 8 : at + 8 + size]
        at += 8 + size + size % 2


def faults_of(samples: Samples, rate: int) -> list[str]:
    """Return the faults of the samples: nan, empty or clipped."""
    if not np.isfinite(samples).all():
        return ["nan"]
    if samples.size < SHORTEST * rate or float(np.sqrt(np.mean(samples**2))) < QUIETEST:
        return ["empty"]
    return ["clipped"] if _longest_run(np.abs(samples) >= FULL_SCALE) >= CLIPPED_RUN else []


def _longest_run(flags: NDArray[np.bool_]) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))
