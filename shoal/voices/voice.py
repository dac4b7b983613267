"""What a voice is: the frames of its recordings and what is said in them."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from shoal.audio.decode import AudioLimits, DecodedAudio, check_reference, read_audio
from shoal.audio.pcm import Samples
from shoal.errors import AudioError, InvalidRequest, TextError
from shoal.text.prompt import Codes, Reference
from shoal.text.tokenizer import CONTROL_SPELLING, SPEAKER_TAG

Clip: TypeAlias = tuple[bytes | Path, str]  # a recording as it came, and its transcript

MAX_NAME_LENGTH = 255
NAME = re.compile(r"[a-zA-Z0-9\-_ ]+")


class VoiceExists(InvalidRequest):
    """The name is taken."""


class BrokenVoice(InvalidRequest):
    """The voice is there and cannot be used; the message says which file is wrong and why."""


class VoiceEncoder(Protocol):
    """Samples to codes."""

    @property
    def sample_rate(self) -> int: ...
    @property
    def frame_rate(self) -> float:
        """Frames per second."""

    @property
    def fingerprint(self) -> str:
        """Equal for codecs whose codes mean the same; letters and digits, since files are named by it."""

    def encode(self, samples: Samples) -> Codes:
        """Mono samples [n] at `sample_rate` -> codes [C, frames]. Called from worker threads."""


@dataclass(frozen=True, slots=True)
class VoiceLimits:
    """What one recording may be, and how much of them together. Stored voices may have any number of recordings."""

    audio: AudioLimits = field(default=AudioLimits(max_seconds=90.0))
    max_transcript: int = 4_000  # characters; fast speech has 25 a second
    max_total_seconds: float = 300.0


DEFAULT_LIMITS = VoiceLimits()


def voice_limits(seconds: float) -> VoiceLimits:
    """The usual limits, with recordings of at most so many seconds."""
    total = max(seconds, DEFAULT_LIMITS.max_total_seconds)
    return VoiceLimits(audio=AudioLimits(max_seconds=seconds), max_total_seconds=total)


@dataclass(frozen=True, eq=False)
class Voice:
    """References in the order a prompt lists them. Codes are read-only: requests share them."""

    name: str | None
    references: tuple[Reference, ...]
    frame_rate: float

    def __post_init__(self) -> None:
        if not self.references:
            raise InvalidRequest("A voice needs at least one recording.")

    @cached_property
    def key(self) -> str:
        """Hash of all codes and transcripts, whatever the name: voices of one key have the same prompt prefix."""
        digest = hashlib.sha256()
        for reference in self.references:
            codes = np.ascontiguousarray(reference.codes, "<i4")
            feed(digest, reference.text.encode(), repr(codes.shape).encode(), codes.tobytes())
        return digest.hexdigest()

    @property
    def frames(self) -> int:
        return sum(reference.codes.shape[1] for reference in self.references)

    @property
    def seconds(self) -> float:
        return self.frames / self.frame_rate


def voice_from_recordings(clips: Sequence[Clip], encoder: VoiceEncoder, limits: VoiceLimits = DEFAULT_LIMITS) -> Voice:
    """A voice without a name. Everything is read and checked before the first recording is encoded.

    Raises AudioError, TextError, or InvalidRequest when there is no recording.
    """
    transcripts = [check_transcript(transcript, limits) for _, transcript in clips]
    recordings = read_recordings([audio_bytes(audio, limits) for audio, _ in clips], encoder.sample_rate, limits)
    references = (
        Reference(transcript, encode_recording(recording, encoder))
        for transcript, recording in zip(transcripts, recordings, strict=True)
    )
    return Voice(None, tuple(references), encoder.frame_rate)


def read_recordings(audios: Sequence[bytes], sample_rate: int, limits: VoiceLimits) -> list[DecodedAudio]:
    recordings: list[DecodedAudio] = []
    left = limits.max_total_seconds
    for audio in audios:
        recordings.append(read_recording(audio, sample_rate, limits))
        left -= recordings[-1].seconds
        if left < 0:
            raise AudioError(f"The recordings together are longer than {limits.max_total_seconds:g} seconds.")
    return recordings


def read_recording(audio: bytes, sample_rate: int, limits: VoiceLimits) -> DecodedAudio:
    recording = read_audio(audio, sample_rate, limits.audio)
    check_reference(recording)
    return recording


def encode_recording(recording: DecodedAudio, encoder: VoiceEncoder) -> Codes:
    codes = np.ascontiguousarray(encoder.encode(recording.samples), np.int32)
    codes.flags.writeable = False
    return codes


def audio_bytes(audio: bytes | Path, limits: VoiceLimits) -> bytes:
    if isinstance(audio, bytes):
        return audio
    try:
        with audio.open("rb") as file:
            # One more than allowed, so that the limit is noticed.
            return file.read(limits.audio.max_bytes + 1)
    except OSError as error:
        raise AudioError(f"Cannot read the recording {audio}: {error.strerror}.") from error


def check_name(name: str) -> str:
    """The name itself. InvalidRequest unless it is safe as the name of a directory: ASCII, no dots, no slashes."""
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidRequest(f"The name of a voice may have {MAX_NAME_LENGTH} characters; this one has {len(name)}.")
    if not is_name(name):
        raise InvalidRequest(
            f"{name!r} cannot name a voice: use the letters a to z, digits, '-', '_', and spaces between them."
        )
    return name


def is_name(name: str) -> bool:
    return len(name) <= MAX_NAME_LENGTH and NAME.fullmatch(name) is not None and name == name.strip()


def check_transcript(transcript: str, limits: VoiceLimits) -> str:
    """The transcript without white space around it, which nobody speaks."""
    text = transcript.strip()
    if not text:
        raise TextError("The transcript is empty.")
    if len(text) > limits.max_transcript:
        raise TextError(f"The transcript is longer than {limits.max_transcript} characters.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TextError("The transcript holds half a character (an unpaired surrogate).") from None
    return text


def check_new_transcript(transcript: str, limits: VoiceLimits) -> str:
    """As `check_transcript`, and with no control token of any model: it would fail every request for the voice."""
    text = check_transcript(transcript, limits)
    for spelling in CONTROL_SPELLING.findall(text):
        if not SPEAKER_TAG.fullmatch(spelling):
            raise TextError(f"The transcript contains {spelling}, the spelling of a control token; remove it.")
    return text


class Digest(Protocol):
    def update(self, piece: bytes, /) -> None: ...


def feed(digest: Digest, *pieces: bytes) -> None:
    """Each piece with its length before it, so that no two lists of pieces read the same."""
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
