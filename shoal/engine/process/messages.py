"""Messages between the supervisor and the engine process: commands in, replies out.

Only plain picklable values. On the pipe a command travels as `(job, command)`, and replies as a list of
`(job, reply)`; job 0 is the process itself. Audio has no envelope of its own: an `AudioChunk` is sent as it is.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.speech import AudioChunk, SamplingParams, SpeechRequest
from shoal.text.plan import TextRules
from shoal.text.prompt import Codes


@dataclass(frozen=True, slots=True)
class Speak:
    request: SpeechRequest
    deadline: float | None = None  # absolute, in `time.monotonic()` seconds, which processes of one machine share
    replayed: bool = False  # an engine process that had this request has died, and the request may be the cause


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
class ReleaseMemory:
    pass


@dataclass(frozen=True, slots=True)
class CancelJob:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    drain: bool
    timeout: float | None


Command = Speak | Encode | Decode | GetStats | ReleaseMemory | CancelJob | Close


@dataclass(frozen=True, slots=True)
class Backends:
    """Execution backends of the model and of the codec: graph, fused, plain-graph, native or eager."""

    model: str = "eager"
    codec: str = "eager"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a loaded model, known without a round trip to the engine. Only `backends` changes in service."""

    default_sampling: SamplingParams
    default_voice: str | None  # for requests that name no voice
    sample_rate: int
    frame_rate: float
    model: str
    device: str
    backends: Backends
    builtin_voices: tuple[Path, ...]  # directories of the voices that come with the model
    text_rules: TextRules
    prompt_seconds: float = math.inf  # seconds of recordings that fit into a prompt
    word_times: bool = False  # whether requests may ask for timestamps
    clones: bool = True  # whether the model speaks with the voice of a recording


@dataclass(frozen=True, slots=True)
class Ready:
    model_info: ModelInfo


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Steps run since the start, the number of active requests, and the backends in use."""

    steps: int
    active: int
    backends: Backends


@dataclass(frozen=True, slots=True)
class LogLine:
    """One formatted log record."""

    logger: str
    level: int
    message: str
    traceback: str | None


@dataclass(frozen=True, slots=True)
class Dying:
    """The device no longer runs anything and the process is about to exit; `blamed` are the jobs whose steps failed."""

    blamed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Result:
    value: Any


@dataclass(frozen=True, slots=True)
class Fragment:
    """Part of a pickled reply that is too large to be sent at once."""

    data: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class Failed:
    error: ShoalError


JobReply = AudioChunk | Result | Failed
Reply = Ready | Heartbeat | LogLine | Dying | JobReply
