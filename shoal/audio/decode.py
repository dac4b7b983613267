"""Recordings in: bytes of any audio file to mono samples at the rate the codec wants.

A recording is untrusted. Its size is checked before it is read, its channels, rate and promised length before it is
decoded, and its true length while it is decoded, so a small file that unfolds into hours stops at the limit.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from shoal.audio.ffmpeg import open_container
from shoal.audio.pcm import Samples
from shoal.audio.resample import Resampler
from shoal.audio.wav import is_wav, open_wav
from shoal.errors import AudioError

# A quiet voice is about -60 dBFS; the noise of 16-bit rounding about -98. Below -80 nobody is speaking.
SILENCE_RMS = 1e-4
# Encoders pad and trim at the ends of a file; losing more than this means that the file was cut.
CUT_SHARE, CUT_SECONDS = 0.05, 0.25


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """What a recording may be. The longest are chosen for voice references: half a minute is recommended."""

    max_bytes: int = 64 << 20
    min_seconds: float = 0.1
    max_seconds: float = 300.0
    max_channels: int = 2
    min_rate: int = 8_000
    max_rate: int = 192_000


DEFAULT_LIMITS = AudioLimits()


@dataclass(frozen=True, slots=True, eq=False)
class DecodedAudio:
    """Mono float32 samples in [-1, 1] at `sample_rate`, and what the file was."""

    samples: Samples
    sample_rate: int
    original_rate: int
    original_channels: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate


class AudioReader(Protocol):
    """A file whose header has been read."""

    @property
    def rate(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def declared_seconds(self) -> float | None:
        """The length the header states; None when it states none."""

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """(rate, samples [n, channels]), a bounded number of samples at a time."""


def read_audio(source: bytes | Path | BinaryIO, sample_rate: int, limits: AudioLimits = DEFAULT_LIMITS) -> DecodedAudio:
    """Decode, average the channels, resample to `sample_rate`; a peak over full scale is brought down to it.

    A file object is read from where it stands and stays open. Raises AudioError for anything that is not a whole
    recording within the limits, MissingExtra when it takes an optional library to tell.
    """
    with _open(_bounded_bytes(source, limits)) as reader:
        return _decode(reader, sample_rate, limits)


def check_reference(recording: DecodedAudio) -> None:
    """AudioError when there is no voice to take from the recording."""
    if np.sqrt(np.mean(np.square(recording.samples, dtype=np.float64))) < SILENCE_RMS:
        raise AudioError("The recording is silent.")


def _bounded_bytes(source: bytes | Path | BinaryIO, limits: AudioLimits) -> bytes:
    if isinstance(source, bytes):
        data = source
    elif isinstance(source, Path):
        data = _read_file(source, limits)
    else:
        data = _read_at_most(source, limits.max_bytes + 1)
    if not data:
        raise AudioError("The recording is empty (0 bytes).")
    _check_size(len(data), limits)
    return data


def _read_file(path: Path, limits: AudioLimits) -> bytes:
    try:
        with path.open("rb") as file:
            _check_size(os.fstat(file.fileno()).st_size, limits)
            return _read_at_most(file, limits.max_bytes + 1)
    except OSError as error:
        raise AudioError(f"Cannot read the recording {path}: {error.strerror}.") from error


def _read_at_most(file: BinaryIO, most: int) -> bytes:
    """Up to `most` bytes; a pipe or a socket may give them in many pieces."""
    pieces: list[bytes] = []
    while most > 0 and (piece := file.read(min(most, 1 << 20))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def _check_size(size: int, limits: AudioLimits) -> None:
    if size > limits.max_bytes:
        raise AudioError(f"The recording is larger than {limits.max_bytes} bytes.")


@contextmanager
def _open(data: bytes) -> Iterator[AudioReader]:
    if _is_text(data):
        raise AudioError("This is a text file, not a recording.")
    wav = open_wav(data) if is_wav(data) else None
    if wav is not None:
        yield wav
    else:
        with open_container(data) as reader:
            yield reader


def _is_text(data: bytes) -> bool:
    """Recordings have a byte below the space, other than line ends and tabs, near their beginning."""
    beginning = data[:512]
    # The old speech corpora are the exception: a page of plain text, then the samples.
    if beginning.startswith(b"NIST_1A"):
        return False
    return not any(byte < 32 and byte not in b"\t\n\f\r" for byte in beginning) and _is_utf8(beginning)


def _is_utf8(beginning: bytes) -> bool:
    try:
        beginning.decode()
    except UnicodeDecodeError as error:
        # The cut may go through a character; anything earlier is not text.
        return len(beginning) - error.start < 4
    return True


def _decode(reader: AudioReader, sample_rate: int, limits: AudioLimits) -> DecodedAudio:
    rate, channels, resampler = 0, 0, None
    pieces: list[Samples] = []
    for rate, block in limited_blocks(reader, limits):
        channels = block.shape[1]
        resampler = resampler or Resampler(rate, sample_rate, quality="VHQ")
        pieces.append(resampler.feed(mono(block)))
    assert resampler is not None, "a recording without a block is refused"
    pieces.append(resampler.finish())
    return DecodedAudio(_within_full_scale(np.concatenate(pieces)), sample_rate, rate, channels)


def limited_blocks(reader: AudioReader, limits: AudioLimits) -> Iterator[tuple[int, Samples]]:
    """As `AudioReader.blocks`. Raises AudioError where a limit is passed, and at the end for what is not there."""
    _check_layout(reader.rate, reader.channels, limits)
    _check_length(reader.declared_seconds or 0.0, limits)
    layout, decoded = None, 0
    for rate, block in reader.blocks():
        if layout is None:
            layout = rate, block.shape[1]
            _check_layout(*layout, limits)
        elif (rate, block.shape[1]) != layout:
            raise AudioError("The recording changes its sample rate or its channels midway.")
        decoded += len(block)
        _check_length(decoded / rate, limits)
        yield rate, block
    if layout is None:
        raise AudioError("Nothing in the recording can be decoded.")
    _check_whole(decoded / layout[0], reader.declared_seconds, limits)


def _check_layout(rate: int, channels: int, limits: AudioLimits) -> None:
    if channels > limits.max_channels:
        raise AudioError(f"The recording has {channels} channels; at most {limits.max_channels} are taken.")
    if not limits.min_rate <= rate <= limits.max_rate:
        raise AudioError(
            f"The recording's sample rate is {rate} Hz; it must be {limits.min_rate} to {limits.max_rate} Hz."
        )


def _check_length(seconds: float, limits: AudioLimits) -> None:
    if seconds > limits.max_seconds:
        raise AudioError(f"The recording is longer than {limits.max_seconds:g} seconds.")


def _check_whole(seconds: float, promised: float | None, limits: AudioLimits) -> None:
    if promised is not None and promised - seconds > max(CUT_SECONDS, CUT_SHARE * promised):
        raise AudioError(f"The recording is cut off: {seconds:.1f} of {promised:.1f} seconds are there.")
    if seconds < limits.min_seconds:
        raise AudioError(f"The recording lasts {seconds:.3f} seconds; at least {limits.min_seconds:g} are needed.")


def mono(block: Samples) -> Samples:
    """The average of the channels [n, channels] -> [n]: no sum, so nothing can clip. Raises AudioError."""
    if not np.isfinite(block).all():
        raise AudioError("The recording holds samples that are not numbers (NaN or infinity).")
    average: Samples = block.mean(axis=1, dtype=np.float64).astype(np.float32)
    return average


def peak_amplitude(samples: Samples) -> float:
    """Raises AudioError."""
    peak = float(np.abs(samples).max(initial=0.0))
    if not np.isfinite(peak):
        raise AudioError("The recording holds samples too large to work with.")
    return peak


def _within_full_scale(samples: Samples) -> Samples:
    peak = peak_amplitude(samples)
    return samples / np.float32(peak) if peak > 1.0 else samples
