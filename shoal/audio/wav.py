"""RIFF/WAVE reader and header writer, so that wav needs no optional library.

Reads PCM of 8, 16, 24 and 32 bits and floats of 32 and 64 bits, plain or WAVE_FORMAT_EXTENSIBLE. Compressed wav files
are left to ffmpeg.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoal.audio.pcm import Samples, to_float
from shoal.errors import AudioError

UNKNOWN = 0xFFFFFFFF
# Programs that write to a pipe put a placeholder of about 2 or 4 GiB into the header.
PLACEHOLDER_SIZE = 0x7FFF0000
HEADER_BYTES = 44
FRAMES_PER_BLOCK = 1 << 16
# A file of millions of empty chunks would take long to scan.
MAX_CHUNKS = 1_000

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
# An extensible header contains the format tag in the first two bytes of a GUID with this tail.
GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")
ENCODINGS = {
    (PCM, 8): "u1",
    (PCM, 16): "<i2",
    (PCM, 24): "i3",
    (PCM, 32): "<i4",
    (FLOAT, 32): "<f4",
    (FLOAT, 64): "<f8",
}


def wav_header(sample_rate: int, data_bytes: int | None = None) -> bytes:
    """Return the 44-byte header of 16-bit mono samples. None: the length is unknown, as in a stream."""
    riff_size = data_size = UNKNOWN
    # The fields cannot hold more than 4 GiB; players handle an unknown length.
    if data_bytes is not None and data_bytes + HEADER_BYTES - 8 < UNKNOWN:
        riff_size, data_size = data_bytes + HEADER_BYTES - 8, data_bytes
    riff = struct.pack("<4sI4s", b"RIFF", riff_size, b"WAVE")
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, PCM, 1, sample_rate, sample_rate * 2, 2, 16)
    return riff + fmt + struct.pack("<4sI", b"data", data_size)


@dataclass(frozen=True, slots=True)
class WavReader:
    """Wav file in memory, decoded block by block."""

    rate: int
    channels: int
    declared_seconds: float | None
    encoding: str
    body: memoryview

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """Yield (rate, samples [n, channels]); a partial last frame is dropped."""
        frame_bytes = self.channels * np.dtype(_storage(self.encoding)).itemsize
        step = FRAMES_PER_BLOCK * frame_bytes
        whole = len(self.body) - len(self.body) % frame_bytes
        for start in range(0, whole, step):
            flat = _decode(self.body[start : min(start + step, whole)], self.encoding)
            yield self.rate, flat.reshape(-1, self.channels)


def is_wav(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def open_wav(data: bytes) -> WavReader | None:
    """Return a reader, or None when the samples are compressed and need another decoder. Raises AudioError."""
    fmt: bytes | None = None
    for place, (name, size, body) in enumerate(_chunks(data)):
        if place == MAX_CHUNKS:
            raise AudioError(f"the wav file has {MAX_CHUNKS:,} chunks without samples")
        if name == b"fmt ":
            fmt = bytes(body)
        elif name == b"data" and fmt is not None:
            return _reader(fmt, size, body)
    raise AudioError("the wav file ends before its samples begin")


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, memoryview]]:
    """Yield (name, declared size, body) of each chunk; the body of a truncated last chunk is shorter."""
    view, at = memoryview(data), 12
    while at + 8 <= len(view):
        name, size = struct.unpack_from("<4sI", view, at)
        # A stream whose header was never corrected states 0 or a placeholder: all that follows are samples.
        endless = name == b"data" and (size == 0 or size >= PLACEHOLDER_SIZE)
        end = len(view) if endless else at + 8 + size
        yield name, UNKNOWN if endless else size, view[at + 8 : end]
        at = end + size % 2


def _reader(fmt: bytes, size: int, body: memoryview) -> WavReader | None:
    if len(fmt) < 16:
        raise AudioError("the wav file has a damaged header")
    tag, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", fmt)
    if tag == EXTENSIBLE and len(fmt) >= 40 and fmt[26:40] == GUID_TAIL:
        (tag,) = struct.unpack_from("<H", fmt, 24)
    encoding = ENCODINGS.get((tag, bits))
    if encoding is None:
        return None
    if channels == 0 or rate == 0 or frame_bytes != channels * bits // 8:
        raise AudioError("the wav file has a damaged header")
    declared = None if size == UNKNOWN else size / frame_bytes / rate
    return WavReader(rate, channels, declared, encoding, body)


def _storage(encoding: str) -> str:
    """Return the numpy dtype of stored samples; 24-bit integers are opaque items of three bytes."""
    return "V3" if encoding == "i3" else encoding


def _decode(body: memoryview, encoding: str) -> Samples:
    if encoding != "i3":
        return to_float(np.frombuffer(body, dtype=encoding))
    # The three bytes become the upper bytes of a 32-bit integer, which keeps full scale.
    wide = np.zeros((len(body) // 3, 4), dtype=np.uint8)
    wide[:, 1:] = np.frombuffer(body, dtype=np.uint8).reshape(-1, 3)
    return to_float(wide.view("<i4").reshape(-1))
