"""Nouns that cross rooms."""

from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InvalidRequest

Samples = NDArray[np.float32]  # mono, in [-1, 1]

Repetition = Literal["upstream", "window"]


class FinishReason(Enum):
    STOP = "stop"  # the model said so
    LENGTH = "length"  # max_frames or the context was reached
    CANCELLED = "cancelled"


class Unchosen:
    """Marks the default of a field. It is a value like any other, and `replace`, pickling and copying keep the mark."""


class UnchosenFloat(float, Unchosen):
    pass


class UnchosenInt(int, Unchosen):
    pass


class UnchosenStr(str, Unchosen):
    pass


UPSTREAM = cast(Repetition, UnchosenStr("upstream"))


@dataclass(frozen=True)
class Sampling:
    """How codes are drawn. The same seed gives the same audio, alone or in a batch.

    In a request, a field that nobody chose is the model's usual; the defaults here are for what has no profile.
    `repetition` chooses what the S1 family's penalty looks at: `upstream` is the released behaviour, which in effect
    penalises the main token of 16 frames ago; `window` penalises all main tokens of the last 16 frames.
    The S2 family ignores the penalty; it redraws repeated tokens instead.
    """

    temperature: float = UnchosenFloat(0.8)
    top_p: float = UnchosenFloat(0.8)
    top_k: int = UnchosenInt(0)  # 0: no limit
    repetition_penalty: float = UnchosenFloat(1.1)
    repetition: Repetition = UPSTREAM
    seed: int = UnchosenInt(0)
    max_frames: int = UnchosenInt(1024)  # 0: as many as the context holds

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 2.0)
        if self.top_p == 0 or self.repetition_penalty == 0:
            raise InvalidRequest("top_p and repetition_penalty must be greater than 0")
        if self.top_k < 0 or self.max_frames < 0:
            raise InvalidRequest("top_k and max_frames must not be negative; 0 means no limit")
        if self.repetition not in ("upstream", "window"):
            raise InvalidRequest(f"repetition is upstream or window, not {self.repetition!r}")
        if not 0 <= self.seed < 2**64:
            raise InvalidRequest(f"seed must be a whole number from 0 to 2**64 - 1, not {self.seed}")

    def over(self, usual: "Sampling") -> "Sampling":
        """The usual, with what was chosen here in its place."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return replace(usual, **{name: value for name, value in values.items() if not isinstance(value, Unchosen)})


@dataclass(frozen=True, slots=True)
class Recording:
    """A voice as it comes with a request: the bytes of an audio file, and what is said in it."""

    audio: bytes
    transcript: str


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """One thing to say. Without `sampling`, or a field of it, it is the model's usual."""

    text: str
    voice: str | None = None  # the name of a stored voice
    recordings: tuple[Recording, ...] = ()  # or recordings of one
    sampling: Sampling | None = None
    chunk_bytes: int | None = None  # longest piece of text per turn; None: the model's usual
    normalize: bool = True  # prepare numbers and symbols as the model needs; False: the text goes as it is written
    timeout: float | None = None  # seconds from now
    whole: bool = False  # audio only when all of it is there, so that a failure can be tried again

    def __post_init__(self) -> None:
        if not isinstance(self.voice, str | None):
            raise InvalidRequest(f"voice is the name of a stored voice or None, not {self.voice!r:.80}")
        if self.voice is not None and self.recordings:
            raise InvalidRequest("give the name of a voice or recordings of one, not both")
        if self.chunk_bytes is not None and not 16 <= self.chunk_bytes <= 100_000:
            raise InvalidRequest(f"chunk length must lie between 16 and 100000 bytes, not {self.chunk_bytes}")
        if self.timeout is not None and not self.timeout > 0:
            raise InvalidRequest(f"timeout must be more than 0 seconds, not {self.timeout:g}")


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """Samples on their way out; `finish` is set on the last chunk of an utterance, which may be empty."""

    samples: Samples
    sample_rate: int
    finish: FinishReason | None = None

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate


@dataclass(frozen=True, slots=True)
class Speech:
    """A whole utterance."""

    samples: Samples
    sample_rate: int
    finish: FinishReason
    codes: NDArray[np.int32]  # [codebooks, frames]

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must lie between {low:g} and {high:g}, not {value:g}")
