"""What supervisor and engine process say to each other. Plain values only: both sides may be of different ages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.speech import AudioChunk, SamplingParams, SpeechRequest
from shoal.text.prompt import Codes


@dataclass(frozen=True, slots=True)
class Speak:
    request: SpeechRequest


@dataclass(frozen=True, slots=True)
class Encode:
    audio: bytes


@dataclass(frozen=True, slots=True)
class Decode:
    codes: Codes


@dataclass(frozen=True, slots=True)
class GetStats:
    pass


@dataclass(frozen=True, slots=True)
class Cancel:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    drain: bool
    timeout: float | None


Order = Speak | Encode | Decode | GetStats | Cancel | Close


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What callers may ask of an engine without waiting for it."""

    default_sampling: SamplingParams
    default_voice: str | None  # of requests that choose none
    sample_rate: int
    frame_rate: float
    model: str
    device: str
    backend: str
    builtin_voices: tuple[Path, ...]  # directories of voices that come with it


@dataclass(frozen=True, slots=True)
class Ready:
    model_info: ModelInfo


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life: steps taken so far, and utterances under way."""

    steps: int
    active: int


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the log."""

    logger: str
    level: int
    message: str
    traceback: str | None


@dataclass(frozen=True, slots=True)
class Spoken:
    chunk: AudioChunk


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    error: ShoalError


# On the pipe each comes with the number of its job; 0 for those that belong to none.
Reply = Ready | Heartbeat | LogLine | Spoken | Answer | Failed
