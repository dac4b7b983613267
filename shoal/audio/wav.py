"""RIFF/WAVE by hand: the one format everybody has must not need a library.

Reads PCM of 8, 16, 24 and 32 bits and floats of 32 and 64, plain or WAVE_FORMAT_EXTENSIBLE. Other codecs that hide in
wav files are left to ffmpeg.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoal.audio.pcm import Samples, to_float
from shoal.errors import AudioError

UNKNOWN = 0xFFFFFFFF
# Writers to a pipe promise about 2 or 4 GiB for want of a better number; nobody means it.
MADE_UP = 0x7FFF0000
HEADER_BYTES = 44
FRAMES_PER_BLOCK = 1 << 16
# Before the samples come a few notes; a file of empty chunks would be read eight bytes at a time.
MAX_CHUNKS = 1_000

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
# An extensible header carries the true tag as the first two bytes of a GUID that ends like this.
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
    """The 44 bytes before 16-bit mono samples. None: the length is not known yet, or never (a stream)."""
    riff_size = data_size = UNKNOWN
    # Past 4 GiB the fields cannot hold the truth; unknown is what players cope with.
    if data_bytes is not None and data_bytes + HEADER_BYTES - 8 < UNKNOWN:
        riff_size, data_size = data_bytes + HEADER_BYTES - 8, data_bytes
    riff = struct.pack("<4sI4s", b"RIFF", riff_size, b"WAVE")
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, PCM, 1, sample_rate, sample_rate * 2, 2, 16)
    return riff + fmt + struct.pack("<4sI", b"data", data_size)


@dataclass(frozen=True, slots=True)
class WavReader:
    """A wav file in memory, decoded block by block."""

    rate: int
    channels: int
    declared_seconds: float | None
    encoding: str
    body: memoryview

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """(rate, samples [n, channels]) until the end; a cut last frame is dropped."""
        frame_bytes = self.channels * np.dtype(_storage(self.encoding)).itemsize
        step = FRAMES_PER_BLOCK * frame_bytes
        whole = len(self.body) - len(self.body) % frame_bytes
        for start in range(0, whole, step):
            flat = _decode(self.body[start : min(start + step, whole)], self.encoding)
            yield self.rate, flat.reshape(-1, self.channels)


def is_wav(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def open_wav(data: bytes) -> WavReader | None:
    """A reader for wav bytes; None when the samples are compressed and another decoder has to try."""
    fmt: bytes | None = None
    for place, (name, size, body) in enumerate(_chunks(data)):
        if place == MAX_CHUNKS:
            raise AudioError(f"The wav file has {MAX_CHUNKS:,} chunks and no samples among them.")
        if name == b"fmt ":
            fmt = bytes(body)
        elif name == b"data" and fmt is not None:
            return _reader(fmt, size, body)
    raise AudioError("The wav file ends before its samples begin.")


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, memoryview]]:
    """(name, promised size, body) of each chunk; a body may be shorter than promised, and the last one is."""
    view, at = memoryview(data), 12
    while at + 8 <= len(view):
        name, size = struct.unpack_from("<4sI", view, at)
        # A stream whose writer never came back says 0 or a made-up number: its samples are all that follows.
        endless = name == b"data" and (size == 0 or size >= MADE_UP)
        end = len(view) if endless else at + 8 + size
        yield name, UNKNOWN if endless else size, view[at + 8 : end]
        at = end + size % 2


def _reader(fmt: bytes, size: int, body: memoryview) -> WavReader | None:
    if len(fmt) < 16:
        raise AudioError("The wav file has a damaged header.")
    tag, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", fmt)
    if tag == EXTENSIBLE and len(fmt) >= 40 and fmt[26:40] == GUID_TAIL:
        (tag,) = struct.unpack_from("<H", fmt, 24)
    encoding = ENCODINGS.get((tag, bits))
    if encoding is None:
        return None
    if channels == 0 or rate == 0 or frame_bytes != channels * bits // 8:
        raise AudioError("The wav file has a damaged header.")
    promised = None if size == UNKNOWN else size / frame_bytes / rate
    return WavReader(rate, channels, promised, encoding, body)


def _storage(encoding: str) -> str:
    """numpy has no 24-bit integer: three bytes are stored as an opaque item."""
    return "V3" if encoding == "i3" else encoding


def _decode(body: memoryview, encoding: str) -> Samples:
    if encoding != "i3":
        return to_float(np.frombuffer(body, dtype=encoding))
    # The three bytes become the upper three of a 32-bit integer, so full scale stays full scale.
    wide = np.zeros((len(body) // 3, 4), dtype=np.uint8)
    wide[:, 1:] = np.frombuffer(body, dtype=np.uint8).reshape(-1, 3)
    return to_float(wide.view("<i4").reshape(-1))
