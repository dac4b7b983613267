"""One request inside the engine: its turns, generated frames and delivery state."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shoal.audio.guard import SpeechGuard
from shoal.engine.output.word_times import WordTimes
from shoal.engine.scheduling.sequence import Sequence, TextSpan, Tokens
from shoal.errors import ShoalError
from shoal.speech import AudioChunk, Samples, SamplingParams, SpokenTurn
from shoal.text.markup.segments import AS_REQUESTED, Delivery

if TYPE_CHECKING:
    from shoal.engine.output.turn_audio import TurnAudio

# Odd multipliers, so that the seeds of all turns and attempts differ modulo 2**64.
TURN_STRIDE = 0x9E3779B97F4A7C15
ATTEMPT_STRIDE = 0xD1B54A32D192ED03
TURN_ATTEMPT_STRIDE = 0xA24BAED4963EE407


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Position of the text of a turn in its prompt, which ends with `count` tokens of text and `after` others."""

    count: int
    after: int
    words: tuple[tuple[int, int], ...]  # tokens [first, last) of each word, counted from the first of the text


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One segment of a long text, as tokens [T, 1 + codebooks]."""

    text: str
    body: Tokens
    continuation: Tokens  # appended after the previous turn
    prefix: Tokens | None = None  # precedes `body` when this turn starts a sequence; shared by all turns
    min_frames: int = 0  # a turn that stops earlier has left out part of its text
    delivery: Delivery = AS_REQUESTED
    silence_after: int = 0  # samples
    hold_frames: int = 0  # frames a stream holds back; a turn that stops earlier can be generated again
    # Split the turn after the words that this many seconds of speech contain; None if one part would be empty.
    divide: Callable[[float], "tuple[Turn, Turn] | None"] = lambda _: None
    text_tokens: TextTokens | None = None  # None without `timestamps`

    @property
    def prompt(self) -> Tokens:
        """Prompt of a sequence that starts with this turn."""
        return self.body if self.prefix is None else np.concatenate((self.prefix, self.body))

    @property
    def prompt_length(self) -> int:
        return len(self.body) + (0 if self.prefix is None else len(self.prefix))


@dataclass(slots=True, eq=False)
class Utterance:
    """One request in the engine. Owned by the engine thread once it is submitted.

    `whole` buffers all audio until the end, so that output that is not speech can be regenerated at any point.
    """

    id: int
    turns: list[Turn]
    sampling: SamplingParams
    whole: bool = False
    deadline: float | None = None  # absolute, on the engine's clock
    client: str = ""  # key of fair queueing
    replayed: bool = False  # an engine process that had this request has died
    context: tuple[SpokenTurn, ...] | None = None  # earlier turns that the prompt of the first turn contains
    carry_turns: bool = True  # every turn continues the previous ones
    first_frames: int | None = None  # frames of the first chunk; None: the engine's setting
    silence_before: int = 0  # samples
    words: WordTimes | None = None  # set for requests with `timestamps`
    sequence: Sequence = field(init=False)
    guard: SpeechGuard | None = None
    audio: "TurnAudio" = field(init=False)
    turn: int = 0  # index of the current turn
    turn_start: int = 0  # frames of the turns before this one
    turn_attempt: int = 0  # retries of the current turn
    truncated: bool = False  # a turn reached max_frames or the context length
    attempt: int = 0  # restarts of the whole utterance
    codes: list[NDArray[np.int32]] = field(default_factory=list)  # [codebooks] per frame, of all turns
    turn_ends: list[int] = field(default_factory=list)  # number of frames at the end of each finished turn
    decoded: int = 0  # frames that have been decoded to samples
    sent: int = 0  # frames whose audio was sent to the caller
    first_sent: float = 0.0  # time of the first chunk, on the engine's clock
    buffered: list[Samples] = field(default_factory=list)

    @property
    def backlog(self) -> int:
        """Frames that have been generated and not decoded."""
        return len(self.codes) - self.decoded

    @property
    def turn_frames(self) -> int:
        """Frames of the current turn."""
        return len(self.codes) - self.turn_start

    @property
    def hold_frames(self) -> int:
        """Frames of the current turn that are not decoded until the turn has more of them, or has ended."""
        if self.guard is None:
            return 0
        turn = self.turns[self.turn]
        return turn.min_frames if self.whole else min(turn.min_frames, turn.hold_frames)

    @property
    def text(self) -> str:
        return " ".join(turn.text for turn in self.turns)

    def turn_sampling(self) -> SamplingParams:
        """Return the sampling of the current turn and attempt; the first turn and attempt have the given seed."""
        offset = self.turn * TURN_STRIDE + self.attempt * ATTEMPT_STRIDE + self.turn_attempt * TURN_ATTEMPT_STRIDE
        return replace(self.sampling, seed=(self.sampling.seed + offset) % 2**64) if offset else self.sampling

    def text_span(self) -> TextSpan | None:
        """Return where the sequence holds the text of the current turn; None if no word times are requested."""
        if self.words is None:
            return None
        tokens = self.turns[self.turn].text_tokens
        assert tokens is not None, "turns of a request with timestamps have them"
        return TextSpan(self.sequence.turn_start - tokens.after - tokens.count, tokens.count)

    def begin_turn(self) -> None:
        """Advance to the next turn."""
        self.turn += 1
        self.turn_start, self.turn_attempt = len(self.codes), 0

    def retry_turn(self, kept_frames: int) -> None:
        """Keep the first `kept_frames` frames of this turn, and generate the rest with the seed of its next attempt.

        Decoded frames must be among those kept.
        """
        self.turn_attempt += 1
        del self.codes[self.turn_start + kept_frames :]
        if self.words is not None and not kept_frames:
            self.words.restart_turn(self.turn)

    def divide_turn(self, seconds: float) -> bool:
        """Move the words after the first `seconds` of speech to a new next turn; return False if there are none."""
        parts = self.turns[self.turn].divide(seconds)
        if parts is not None:
            self.turns[self.turn : self.turn + 1] = parts
            if self.words is not None and parts[0].text_tokens is not None:
                self.words.divide_turn(self.turn, len(parts[0].text_tokens.words))
        return parts is not None

    def restart(self) -> None:
        """Reset to the first turn, with the seed of the next attempt."""
        self.attempt += 1
        self.turn = self.turn_start = self.turn_attempt = self.decoded = self.sent = 0
        self.truncated = False
        self.codes.clear()
        self.turn_ends.clear()
        self.buffered.clear()
        if self.words is not None:
            self.words.restart()

    def spoken_context(self) -> tuple[SpokenTurn, ...] | None:
        """Return the context for the next request: the turns before this utterance and its own."""
        if self.context is None:
            return None
        bounds, codes = pairwise((0, *self.turn_ends)), self.all_codes()
        spoken = zip(self.turns, bounds, strict=False)
        # Turns in a voice that the markup named cannot be context for the voice of the request.
        own = ((turn, place) for turn, place in spoken if turn.delivery.voice is None)
        return (*self.context, *(SpokenTurn(turn.text, codes[:, start:end]) for turn, (start, end) in own))

    def all_codes(self) -> NDArray[np.int32]:
        """Return the codes [codebooks, frames] of all turns."""
        width = self.turns[0].body.shape[1] - 1
        return np.stack(self.codes, axis=1) if self.codes else np.zeros((width, 0), np.int32)


@dataclass(frozen=True, slots=True)
class Event:
    """A chunk of an utterance, or the error that ended it."""

    utterance: Utterance
    chunk: AudioChunk | None = None
    error: ShoalError | None = None

    @property
    def last(self) -> bool:
        return self.error is not None or (self.chunk is not None and self.chunk.finish is not None)

    def chunk_or_raise(self) -> AudioChunk:
        """Return the chunk, or raise the error."""
        if self.error is not None:
            raise self.error
        assert self.chunk is not None, "an event has a chunk or an error"
        return self.chunk


class UtteranceStream:
    """Chunks of a submitted utterance, and its codes once it has ended."""

    def __init__(self, utterance: Utterance, chunks: Generator[AudioChunk, None, None]) -> None:
        self._utterance, self._chunks = utterance, chunks

    def __iter__(self) -> Generator[AudioChunk, None, None]:
        return self._chunks

    def codes(self) -> NDArray[np.int32]:
        return self._utterance.all_codes()

    @property
    def turn(self) -> tuple[int, int]:
        """Turns started so far, and turns in total."""
        return self._utterance.turn + 1, len(self._utterance.turns)

    def close(self) -> None:
        """Cancel the rest of the utterance."""
        self._chunks.close()
