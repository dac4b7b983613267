"""One request on its way through the engine: the turns it speaks, and the frames that wait to become samples."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shoal.audio.guard import SpeechGuard
from shoal.engine.sequence import Sequence, Tokens
from shoal.errors import ShoalError
from shoal.speech import AudioChunk, Samples, SamplingParams

# Odd, so that the seeds of all turns and attempts differ.
TURN_STRIDE = 0x9E3779B97F4A7C15
ATTEMPT_STRIDE = 0xD1B54A32D192ED03


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One piece of a long text, as tokens [T, 1 + codebooks]."""

    text: str
    own: Tokens
    tail: Tokens  # what leads here from the end of the turn before
    voice: Tokens | None = None  # what comes before `own` in a prompt for this turn alone; all turns share it

    @property
    def prompt(self) -> Tokens:
        """A prompt for this turn alone."""
        return self.own if self.voice is None else np.concatenate((self.voice, self.own))

    @property
    def tokens(self) -> int:
        """Of the opening."""
        return len(self.own) + (0 if self.voice is None else len(self.voice))


@dataclass(slots=True, eq=False)
class Utterance:
    """`whole` holds all audio back until the end: nothing has been heard, so a failure can still be tried again."""

    id: int
    turns: list[Turn]
    sampling: SamplingParams
    whole: bool = False
    deadline: float | None = None  # on the engine's clock
    sequence: Sequence = field(init=False)
    guard: SpeechGuard | None = None
    turn: int = 0
    cut: bool = False  # a turn was longer than the caller wanted
    attempt: int = 0
    codes: list[NDArray[np.int32]] = field(default_factory=list)  # [codebooks] per frame, of all turns
    decoded: int = 0  # frames that have become samples
    sent: int = 0  # frames that have left the engine
    first_sent: float = 0.0
    held: list[Samples] = field(default_factory=list)

    @property
    def backlog(self) -> int:
        return len(self.codes) - self.decoded

    @property
    def text(self) -> str:
        return " ".join(turn.text for turn in self.turns)

    def turn_sampling(self) -> SamplingParams:
        """The settings of this turn of this attempt; the first of both has the seed the caller gave."""
        seed = self.sampling.seed + self.turn * TURN_STRIDE + self.attempt * ATTEMPT_STRIDE
        return replace(self.sampling, seed=seed % 2**64)

    def restart(self) -> None:
        """Nothing has been said yet, and the dice are others."""
        self.attempt += 1
        self.turn = self.decoded = self.sent = 0
        self.cut = False
        self.codes.clear()
        self.held.clear()

    def all_codes(self) -> NDArray[np.int32]:
        """[codebooks, frames]"""
        width = self.turns[0].own.shape[1] - 1
        return np.stack(self.codes, axis=1) if self.codes else np.zeros((width, 0), np.int32)


@dataclass(frozen=True, slots=True)
class Event:
    """Something to tell the one who asked: a chunk, or why there will be no more."""

    utterance: Utterance
    chunk: AudioChunk | None = None
    error: ShoalError | None = None

    @property
    def last(self) -> bool:
        return self.error is not None or (self.chunk is not None and self.chunk.finish is not None)
