"""Decode untrusted audio files to mono samples at a given rate.

The size is checked before reading, the channels, rate and declared duration before decoding, and the actual duration
while decoding, so that a small file that decompresses into hours stops at the limit. Plain wav files are decoded here;
all other formats by ffmpeg in a child process with resource limits (`sandbox/`).
"""

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from shoal.audio.ffmpeg import MAX_PACKETS, MAX_PACKETS_PER_SECOND, NEEDS_FFMPEG, open_container
from shoal.audio.mp4 import check_index
from shoal.audio.pcm import Samples
from shoal.audio.resample import Resampler
from shoal.audio.sandbox.messages import DecodeRequest
from shoal.audio.sandbox.pool import POOL, interpreter
from shoal.audio.wav import is_wav, open_wav
from shoal.errors import AudioError, MissingExtra

logger = logging.getLogger(__name__)

# RMS of -80 dBFS: below a quiet voice (about -60) and above 16-bit quantization noise (about -98).
SILENCE_RMS = 1e-4
# Encoders pad and trim the ends of a file; a file shorter than declared by more than this is truncated.
TRUNCATED_FRACTION, TRUNCATED_SECONDS = 0.05, 0.25


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """Limits of accepted recordings. Rates in Hz. Generous defaults: 10 to 30 s are recommended for a voice."""

    max_bytes: int = 64 << 20
    min_seconds: float = 0.1
    max_seconds: float = 300.0
    max_channels: int = 2
    min_rate: int = 8_000
    max_rate: int = 192_000


DEFAULT_LIMITS = AudioLimits()


@dataclass(frozen=True, slots=True, eq=False)
class DecodedAudio:
    """Mono float32 samples in [-1, 1] at `sample_rate`, with the format of the file."""

    samples: Samples
    sample_rate: int
    original_rate: int
    original_channels: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate


class AudioReader(Protocol):
    """Open audio file whose header has been read."""

    @property
    def rate(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def declared_seconds(self) -> float | None:
        """Duration according to the header; None if it states none."""

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """Yield (rate, samples [n, channels]) in blocks of bounded size."""


def read_audio(source: bytes | Path | BinaryIO, sample_rate: int, limits: AudioLimits = DEFAULT_LIMITS) -> DecodedAudio:
    """Decode, average the channels, resample to `sample_rate`, and scale a peak above full scale down to it.

    A file object is read from its current position and stays open. Raises AudioError for anything but a complete
    recording within the limits, MissingExtra when the format needs an optional library.
    """
    data = _bounded_bytes(source, limits)
    if _is_text(data):
        raise AudioError("this is a text file, not a recording")
    wav = open_wav(data) if is_wav(data) else None
    return _decode(wav, sample_rate, limits) if wav is not None else _decode_in_sandbox(data, sample_rate, limits)


def decode_container(data: bytes, sample_rate: int, limits: AudioLimits) -> DecodedAudio:
    """Decode with ffmpeg in this process, for files that are trusted or within the sandbox. Raises as `read_audio`."""
    check_index(data, MAX_PACKETS + int(MAX_PACKETS_PER_SECOND * limits.max_seconds))
    with open_container(data) as reader:
        return _decode(reader, sample_rate, limits)


def _decode_in_sandbox(data: bytes, sample_rate: int, limits: AudioLimits) -> DecodedAudio:
    if find_spec("av") is None:
        raise MissingExtra(NEEDS_FFMPEG)
    if interpreter() is None:
        _warn_unprotected()
        return decode_container(data, sample_rate, limits)
    fields = limits.max_bytes, limits.min_seconds, limits.max_seconds, limits.max_channels
    request = DecodeRequest(sample_rate, *fields, limits.min_rate, limits.max_rate, len(data))
    samples, rate, channels = POOL.decode(data, request)
    return DecodedAudio(samples, sample_rate, rate, channels)


@cache
def _warn_unprotected() -> None:
    logger.warning("recordings are decoded without resource limits: %r is not a Python interpreter", sys.executable)


def check_reference(recording: DecodedAudio) -> None:
    """Raise AudioError if the recording is silent."""
    if np.sqrt(np.mean(np.square(recording.samples, dtype=np.float64))) < SILENCE_RMS:
        raise AudioError("the recording is silent")


def _bounded_bytes(source: bytes | Path | BinaryIO, limits: AudioLimits) -> bytes:
    if isinstance(source, bytes):
        data = source
    elif isinstance(source, Path):
        data = _read_file(source, limits)
    else:
        data = _read_at_most(source, limits.max_bytes + 1)
    if not data:
        raise AudioError("the recording is empty (0 bytes)")
    _check_size(len(data), limits)
    return data


def _read_file(path: Path, limits: AudioLimits) -> bytes:
    try:
        with path.open("rb") as file:
            _check_size(os.fstat(file.fileno()).st_size, limits)
            return _read_at_most(file, limits.max_bytes + 1)
    except OSError as error:
        raise AudioError(f"cannot read the recording {path}: {error.strerror}") from error


def _read_at_most(file: BinaryIO, max_bytes: int) -> bytes:
    """Read up to `max_bytes`; a pipe or a socket may return fewer per call."""
    pieces: list[bytes] = []
    while max_bytes > 0 and (piece := file.read(min(max_bytes, 1 << 20))):
        pieces.append(piece)
        max_bytes -= len(piece)
    return b"".join(pieces)


def _check_size(size: int, limits: AudioLimits) -> None:
    if size > limits.max_bytes:
        raise AudioError(f"the recording is larger than {limits.max_bytes} bytes")


def _is_text(data: bytes) -> bool:
    """Detect text files: audio files have control bytes near their beginning."""
    beginning = data[:512]
    # NIST SPHERE files begin with a text header.
    if beginning.startswith(b"NIST_1A"):
        return False
    return not any(byte < 32 and byte not in b"\t\n\f\r" for byte in beginning) and _is_utf8(beginning)


def _is_utf8(beginning: bytes) -> bool:
    try:
        beginning.decode()
    except UnicodeDecodeError as error:
        # The slice may end inside a character; an error before that means binary data.
        return len(beginning) - error.start < 4
    return True


def _decode(reader: AudioReader, sample_rate: int, limits: AudioLimits) -> DecodedAudio:
    rate, channels, resampler = 0, 0, None
    pieces: list[Samples] = []
    for rate, block in limited_blocks(reader, limits):
        channels = block.shape[1]
        resampler = resampler or Resampler(rate, sample_rate, quality="VHQ")
        pieces.append(resampler.feed(mono(block)))
    assert resampler is not None, "limited_blocks raises for a recording without blocks"
    pieces.append(resampler.finish())
    return DecodedAudio(_within_full_scale(np.concatenate(pieces)), sample_rate, rate, channels)


def limited_blocks(reader: AudioReader, limits: AudioLimits) -> Iterator[tuple[int, Samples]]:
    """Yield the blocks of a reader. Raises AudioError as soon as a limit is exceeded, and for a truncated file."""
    _check_layout(reader.rate, reader.channels, limits)
    _check_length(reader.declared_seconds or 0.0, limits)
    layout, decoded = None, 0
    for rate, block in reader.blocks():
        if layout is None:
            layout = rate, block.shape[1]
            _check_layout(*layout, limits)
        elif (rate, block.shape[1]) != layout:
            raise AudioError("the sample rate or the number of channels changes within the recording")
        decoded += len(block)
        _check_length(decoded / rate, limits)
        yield rate, block
    if layout is None:
        raise AudioError("the recording has no decodable audio")
    _check_whole(decoded / layout[0], reader.declared_seconds, limits)


def _check_layout(rate: int, channels: int, limits: AudioLimits) -> None:
    if channels > limits.max_channels:
        raise AudioError(f"the recording has {channels} channels; at most {limits.max_channels} are allowed")
    if not limits.min_rate <= rate <= limits.max_rate:
        raise AudioError(
            f"the recording's sample rate is {rate} Hz; it must be {limits.min_rate} to {limits.max_rate} Hz"
        )


def _check_length(seconds: float, limits: AudioLimits) -> None:
    if seconds > limits.max_seconds:
        raise AudioError(f"the recording is longer than {limits.max_seconds:g} seconds")


def _check_whole(seconds: float, declared: float | None, limits: AudioLimits) -> None:
    if declared is not None and declared - seconds > max(TRUNCATED_SECONDS, TRUNCATED_FRACTION * declared):
        raise AudioError(f"the recording is truncated: {seconds:.1f} of {declared:.1f} seconds are present")
    if seconds < limits.min_seconds:
        raise AudioError(f"the recording lasts {seconds:.3f} seconds; at least {limits.min_seconds:g} are required")


def mono(block: Samples) -> Samples:
    """Average the channels, [n, channels] -> [n]; unlike a sum, this cannot clip. Raises AudioError."""
    if not np.isfinite(block).all():
        raise AudioError("the recording contains samples that are NaN or infinite")
    average: Samples = block.mean(axis=1, dtype=np.float64).astype(np.float32)
    return average


def peak_amplitude(samples: Samples) -> float:
    """Return the largest absolute sample. Raises AudioError if it is not finite."""
    peak = float(np.abs(samples).max(initial=0.0))
    if not np.isfinite(peak):
        raise AudioError("the recording contains samples that are out of range")
    return peak


def _within_full_scale(samples: Samples) -> Samples:
    peak = peak_amplitude(samples)
    return samples / np.float32(peak) if peak > 1.0 else samples
