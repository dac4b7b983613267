"""Types that all packages share: requests, sampling settings and audio."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InvalidRequest

Samples = NDArray[np.float32]  # mono, in [-1, 1]; louder where a text raises its volume

MAX_SEED = 2**64 - 1
MAX_COUNT = 2**31 - 1  # of `top_k` and `max_frames`, which are limits: more than any model has

LANGUAGES = ("en", "de", "fr")  # languages that texts can be normalized in

Repetition = Literal["upstream", "window"]


class FinishReason(Enum):
    STOP = "stop"  # the model sampled its stop token
    LENGTH = "length"  # max_frames or the context limit was reached
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a request; a field that is None takes the model's default.

    The same seed gives the same audio, whatever the batch size. `top_k` 0 means no limit, `max_frames` 0 as many as
    the context holds. `repetition` selects what the S1 family's penalty applies to: `upstream` is the released
    behaviour, which in effect penalises only the semantic token of 16 frames ago; `window` penalises all semantic
    tokens of the last 16 frames. The S2 family ignores the penalty; it resamples repeated tokens instead.
    Raises InvalidRequest for values out of range.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    repetition: Repetition | None = None
    seed: int | None = None
    max_frames: int | None = None

    def __post_init__(self) -> None:
        SamplingParams(**self.given())

    def given(self) -> dict[str, Any]:
        """Return the fields that are set."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def resolve(self, defaults: "SamplingParams") -> "SamplingParams":
        """Return `defaults` with the fields that are set here in their place."""
        return replace(defaults, **self.given())


@dataclass(frozen=True)
class SamplingParams(Sampling):
    """Complete sampling settings of a sequence: every field has a value. A model's defaults are of this type."""

    temperature: float = 0.8
    top_p: float = 0.8
    top_k: int = 0
    repetition_penalty: float = 1.1
    repetition: Repetition = "upstream"
    seed: int = 0
    max_frames: int = 1024

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 2.0)
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise InvalidRequest(f"{name} must be greater than 0")
        if self.repetition not in ("upstream", "window"):
            raise InvalidRequest(f"repetition must be upstream or window, not {self.repetition!r}")
        for name, high in (("top_k", MAX_COUNT), ("max_frames", MAX_COUNT), ("seed", MAX_SEED)):
            # Integers of numpy would overflow in the seeds of later turns, on the engine thread.
            object.__setattr__(self, name, _whole_number(name, getattr(self, name), 0, high))


@dataclass(frozen=True, slots=True)
class Recording:
    """Voice reference sent with a request: the bytes of an audio file and its transcript.

    `speaker` is the number of its speaker in a dialogue, from 0; None: each recording is a speaker of its own.
    """

    audio: bytes
    transcript: str
    speaker: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SpokenTurn:
    """A turn that was spoken: its text as the model read it, and its codes [codebooks, frames]."""

    text: str
    codes: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Pronunciation:
    """Entry of a lexicon: how a word is read. Phonemes are Arpabet; models that read none use the respelling."""

    written: str
    respelling: str | None = None
    phonemes: str | None = None


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the request's text, as it was written, and when it is spoken.

    Times are seconds from the first sample of the utterance; the word is `text[first:last]` of the request's text.
    """

    text: str
    start: float
    end: float
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """Text to speak, with its voice and settings. The model's defaults apply to all sampling settings that are None."""

    text: str
    voice: str | None = None  # name of a stored voice
    # Voices to use when `voice` is not stored, in this order; None: the model's default.
    fallback_voices: tuple[str | None, ...] = ()
    voices: tuple[str, ...] = ()  # stored voices of the speakers of a dialogue, in order; excludes `voice`
    recordings: tuple[Recording, ...] = ()  # references of a voice that is not stored; excludes `voice`
    sampling: Sampling | None = None
    chunk_bytes: int | None = None  # maximum bytes of UTF-8 per turn; None: the model's default
    normalize: bool = True  # read markup, spell out what the model cannot read; False: use the text as written
    language: str | None = None  # spell out numbers and symbols in this language, for models that do not need it
    ssml: bool | None = None  # the text is SSML; None: it is if it begins with <speak>
    lexicon: tuple[Pronunciation, ...] = ()
    timeout: float | None = None  # seconds from admission to the last sample
    whole: bool = False  # return audio only when complete, so that a failed generation can be retried
    client: str = ""  # name of the API key; waiting requests start round robin over the clients
    # Earlier turns that this text continues: `AudioChunk.context` of the previous request's last chunk. None: the text
    # stands alone and its turns are not returned.
    context: tuple[SpokenTurn, ...] | None = None
    carry_turns: bool = True  # generate each turn of a long text with the previous turns as context
    first_chunk_frames: int | None = None  # frames of audio before the first chunk is sent; None: the engine's setting
    timestamps: bool = False  # report when each word is spoken, with the chunks of audio

    def __post_init__(self) -> None:
        for name in ("text", "client"):
            if not isinstance(getattr(self, name), str):
                raise InvalidRequest(f"{name} must be a string, not {getattr(self, name)!r:.80}")
        if not isinstance(self.sampling, Sampling | None):
            raise InvalidRequest(f"sampling must be a shoal.Sampling or None, not {self.sampling!r:.80}")
        if not isinstance(self.voice, str | None):
            raise InvalidRequest(f"voice must be the name of a stored voice or None, not {self.voice!r:.80}")
        if (self.voice is not None) + bool(self.voices) + bool(self.recordings) > 1:
            raise InvalidRequest("give only one of voice, voices and recordings")
        if self.fallback_voices and self.voice is None:
            raise InvalidRequest("fallback_voices replace a voice: give one")
        for name, low, high in (("chunk_bytes", 16, 100_000), ("first_chunk_frames", 1, MAX_COUNT)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _whole_number(name, getattr(self, name), low, high))
        if self.language is not None and self.language not in LANGUAGES:
            raise InvalidRequest(f"language must be one of {', '.join(LANGUAGES)}, not {self.language!r:.40}")
        if self.timeout is not None and not (isinstance(self.timeout, Real) and self.timeout > 0):
            raise InvalidRequest(f"timeout must be greater than 0 seconds, not {self.timeout!r:.40}")

    def deadline_from(self, admitted: float) -> float | None:
        """Return the absolute deadline, on the clock of `admitted`; None without a timeout."""
        return None if self.timeout is None else admitted + self.timeout

    def first_voice(self, exists: Callable[[str], bool]) -> str | None:
        """Return the first of `voice` and its fallbacks that exists, else `voice`; None: the model's default."""
        if not self.fallback_voices:
            return self.voice
        names = (self.voice, *self.fallback_voices)
        return next((name for name in names if name is None or exists(name)), self.voice)


@dataclass(frozen=True, slots=True, eq=False)
class AudioChunk:
    """Generated samples; `finish` is set on the last chunk of an utterance, which may be empty.

    `context` is set on the last chunk of a request with a context: the turns that the next request can continue.
    `words` are those that have ended since the previous chunk, for requests with `timestamps`.
    """

    samples: Samples
    sample_rate: int
    finish: FinishReason | None = None
    context: tuple[SpokenTurn, ...] | None = None
    words: tuple[Word, ...] = ()

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """Complete audio of an utterance, with its codes."""

    samples: Samples
    sample_rate: int
    finish: FinishReason
    codes: NDArray[np.int32]  # [codebooks, frames]
    words: tuple[Word, ...] = ()  # empty without `timestamps`

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (isinstance(value, Real) and low <= value <= high):
        raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, not {value!r:.80}")


def _whole_number(name: str, value: object, low: int, high: int) -> int:
    """Return an integer, also one of numpy, as an int. Raises InvalidRequest."""
    if not (isinstance(value, Integral) and low <= int(value) <= high):
        raise InvalidRequest(f"{name} must be a whole number from {low} to {high}, not {value!r:.80}")
    return int(value)
