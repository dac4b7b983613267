"""Voices: the codes of reference recordings and their transcripts."""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from shoal.audio.decode import AudioLimits, DecodedAudio, check_reference, read_audio
from shoal.audio.guard import reading_seconds
from shoal.audio.pcm import Samples
from shoal.codec.config import CodecConfig
from shoal.errors import AudioError, InvalidRequest, TextError
from shoal.text.prompt import Codes, Reference
from shoal.text.tokenizer import CONTROL_SPELLING, SPEAKER_TAG

Clip: TypeAlias = tuple[bytes | Path, str]  # encoded audio file and its transcript

MAX_NAME_LENGTH = 255
# Bounds of `Voice.pace`: a recording with long pauses says little about the reading speed of its voice.
PACE_RANGE = (0.5, 1.25)
NAME = re.compile(r"[a-zA-Z0-9\-_ ]+")


class VoiceExists(InvalidRequest):
    """A voice with this name exists already."""


class BrokenVoice(InvalidRequest):
    """The voice exists but cannot be used; the message names the file and the cause."""


class VoiceEncoder(Protocol):
    """Encodes samples into codes."""

    @property
    def sample_rate(self) -> int: ...
    @property
    def frame_rate(self) -> float:
        """Frames per second."""

    @property
    def fingerprint(self) -> str:
        """Identifier shared by codecs with interchangeable codes; alphanumeric, because it is part of file names."""

    def encode(self, samples: Samples) -> Codes:
        """Return the codes [codebooks, frames] of mono samples [n] at `sample_rate`. Called from worker threads."""


class CodecRates:
    """Base of voice encoders: sample rate and frame rate of the codec."""

    def __init__(self, config: CodecConfig) -> None:
        self.sample_rate, self.frame_rate = config.sample_rate, config.frame_rate


@dataclass(frozen=True, slots=True)
class VoiceLimits:
    """Limits of one recording, and of all recordings of a voice. Stored voices may have any number of recordings."""

    audio: AudioLimits = field(default=AudioLimits(max_seconds=90.0))
    max_transcript: int = 4_000  # characters; fast speech has 25 per second
    max_total_seconds: float = 300.0
    prompt_seconds: float = math.inf  # audio that fits into the model's prompt


DEFAULT_LIMITS = VoiceLimits()


def voice_limits(seconds: float, prompt_seconds: float = math.inf) -> VoiceLimits:
    """Return the default limits with recordings of at most `seconds`, and `prompt_seconds` as the model's maximum."""
    total = max(seconds, DEFAULT_LIMITS.max_total_seconds)
    return VoiceLimits(AudioLimits(max_seconds=seconds), max_total_seconds=total, prompt_seconds=prompt_seconds)


@dataclass(frozen=True, eq=False)
class Voice:
    """References in prompt order. The codes are read-only, because requests share them."""

    name: str | None
    references: tuple[Reference, ...]
    frame_rate: float

    def __post_init__(self) -> None:
        if not self.references:
            raise InvalidRequest("a voice needs at least one recording")

    @cached_property
    def pace(self) -> float:
        """Duration of the recordings relative to an ordinary reading of their transcripts, within PACE_RANGE."""
        seconds = sum(reference.codes.shape[1] for reference in self.references) / self.frame_rate
        reading = sum(reading_seconds(reference.text) for reference in self.references)
        return min(max(seconds / reading, PACE_RANGE[0]), PACE_RANGE[1]) if reading else 1.0

    @cached_property
    def key(self) -> str:
        """Hash of all codes and transcripts, without the name: voices with equal keys have the same prompt prefix."""
        digest = hashlib.sha256()
        for reference in self.references:
            codes = np.ascontiguousarray(reference.codes, "<i4")
            shape = repr((codes.shape, reference.speaker)).encode()
            hash_parts(digest, reference.text.encode(), shape, codes.tobytes())
        return digest.hexdigest()

    @property
    def frames(self) -> int:
        return sum(reference.codes.shape[1] for reference in self.references)

    @property
    def seconds(self) -> float:
        return self.frames / self.frame_rate


def dialogue_voice(speakers: Sequence[Voice]) -> Voice:
    """Return the voice of a dialogue: the references of all speakers, each with the number of its speaker."""
    references = (
        replace(reference, speaker=number) for number, voice in enumerate(speakers) for reference in voice.references
    )
    return Voice(None, tuple(references), speakers[0].frame_rate)


def voice_from_recordings(clips: Sequence[Clip], encoder: VoiceEncoder, limits: VoiceLimits = DEFAULT_LIMITS) -> Voice:
    """Return a voice without a name. All recordings are read and checked before the first one is encoded.

    Raises AudioError, TextError, or InvalidRequest without a recording.
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
    remaining = limits.max_total_seconds
    for audio in audios:
        recordings.append(read_recording(audio, sample_rate, limits))
        remaining -= recordings[-1].seconds
        if remaining < 0:
            raise AudioError(f"the recordings together are longer than {limits.max_total_seconds:g} seconds")
        check_prompt(limits.max_total_seconds - remaining, limits)
    return recordings


def check_prompt(seconds: float, limits: VoiceLimits) -> None:
    """Raise AudioError for recordings that no request could use; a request would say so only after encoding them."""
    if seconds > limits.prompt_seconds:
        raise AudioError(
            f"the recordings last {seconds:.1f} seconds and the prompt of this model holds "
            f"{limits.prompt_seconds:.1f}, with the text: use a shorter recording, 10 to 30 seconds are best"
        )


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
            # One byte more than allowed, so that the decoder notices the limit.
            return file.read(limits.audio.max_bytes + 1)
    except OSError as error:
        raise AudioError(f"cannot read the recording {audio}: {error.strerror}") from error


def check_name(name: str) -> str:
    """Return the name. Raises InvalidRequest unless it is a safe directory name: ASCII, no dots, no slashes."""
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidRequest(f"a voice name has at most {MAX_NAME_LENGTH} characters, not {len(name)}")
    if not is_name(name):
        raise InvalidRequest(
            f"{name!r} cannot name a voice: use the letters a to z, digits, '-', '_', and spaces between them"
        )
    return name


def is_name(name: str) -> bool:
    return len(name) <= MAX_NAME_LENGTH and NAME.fullmatch(name) is not None and name == name.strip()


def check_transcript(transcript: str, limits: VoiceLimits) -> str:
    """Return the transcript without surrounding white space. Raises TextError."""
    text = transcript.strip()
    if not text:
        raise TextError("the transcript is empty")
    if len(text) > limits.max_transcript:
        raise TextError(f"the transcript is longer than {limits.max_transcript} characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TextError("the transcript contains an unpaired surrogate (half a character)") from None
    return text


def check_new_transcript(transcript: str, limits: VoiceLimits) -> str:
    """Check as `check_transcript`, and reject control tokens of any model: every request with the voice would fail."""
    text = check_transcript(transcript, limits)
    for spelling in CONTROL_SPELLING.findall(text):
        if not SPEAKER_TAG.fullmatch(spelling):
            raise TextError(f"the transcript contains the control token {spelling}; remove it")
    return text


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def hash_parts(digest: Digest, *parts: bytes) -> None:
    """Hash each part prefixed by its length, so that different lists of parts never hash the same bytes."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
