"""One sequence of the scheduler: its tokens, progress, and KV blocks.

Positions of a sequence, with the host up to one step behind the device:

    |<------ prompt ------>|<- frames of this turn ->|<- in flight ->|
    0                  turn_start                 length          planned
    |<-- computed: keys and values are in the cache, or will be after the step in flight -->|
    |<-- committed: the step that computed them has ended -->|
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.engine.scheduling.blocks import Key, extend_keys
from shoal.speech import FinishReason, SamplingParams

Tokens = NDArray[np.int32]  # [length, 1 + codebooks]


class TextSpan(NamedTuple):
    """Positions [begin, begin + length) of a sequence that hold the text of its turn."""

    begin: int
    length: int


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence in the scheduler; the module's diagram shows the positions."""

    id: int
    sampling: SamplingParams
    max_length: int  # maximum length in tokens
    tokens: Tokens
    client: str = ""  # key of fair queueing
    length: int = 0
    turn_start: int = 0
    planned: int = 0
    computed: int = 0
    committed: int = 0
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)  # hashes of all full blocks of known tokens
    sealed: int = 0  # number of blocks registered in the pool by their key
    bound: bool = False  # the device has the newest token of this slot
    epoch: int = 0  # incremented to invalidate results of steps in flight
    arrived: int = 0  # order of admission; the latest is preempted first
    finish: FinishReason | None = None
    text: TextSpan | None = None  # span whose attention weights are read with every frame; None: not read

    @classmethod
    def start(cls, id: int, prompt: Tokens, sampling: SamplingParams, max_length: int, client: str = "") -> "Sequence":
        """Return a new sequence with a prompt [T, 1 + codebooks]."""
        tokens = np.zeros((max(len(prompt), 64), prompt.shape[1]), np.int32)
        sequence = cls(id, sampling, max_length, tokens, client)
        sequence.begin_turn(prompt, sampling)
        return sequence

    @property
    def frames(self) -> int:
        """Frames of the current turn that the host has received."""
        return self.length - self.turn_start

    @property
    def decoding(self) -> bool:
        """Return whether only the newest token, which is on the device, remains to be computed."""
        return self.bound and self.planned - self.computed == 1

    @property
    def exhausted(self) -> bool:
        """Return whether the maximum number of frames of this turn is planned."""
        max_frames = self.sampling.max_frames
        return self.planned >= self.max_length or (max_frames > 0 and self.planned - self.turn_start >= max_frames)

    def begin_turn(self, prompt: Tokens, sampling: SamplingParams) -> None:
        """Append the prompt of the next turn; earlier turns stay in the context."""
        self.extend(prompt)
        self.sampling = sampling
        self.turn_start = self.planned = self.length
        self.computed = min(self.computed, self.length - len(prompt))
        self.committed = min(self.committed, self.computed)
        self.finish = None
        self.discard_in_flight()

    def rewind_turn(self, sampling: SamplingParams, block_size: int, kept_frames: int = 0) -> None:
        """Drop the frames of this turn after the first `kept_frames`, to sample them again.

        The KV blocks must have been released.
        """
        self.length = self.turn_start + kept_frames
        del self.keys[self.length // block_size :]
        self.sampling, self.finish = sampling, None
        self.discard_in_flight()

    def extend(self, tokens: Tokens) -> None:
        """Append tokens [T, 1 + codebooks]."""
        need = self.length + len(tokens)
        if need > len(self.tokens):
            grown = np.zeros((max(need, 2 * len(self.tokens)), self.tokens.shape[1]), np.int32)
            grown[: self.length] = self.tokens[: self.length]
            self.tokens = grown
        self.tokens[self.length : need] = tokens
        self.length = need

    def append(self, token: Tokens) -> None:
        """Append one token [1 + codebooks]; a fast `extend` for the hot path."""
        if self.length == len(self.tokens):
            self.tokens = np.concatenate((self.tokens, np.zeros_like(self.tokens)))
        self.tokens[self.length] = token
        self.length += 1

    def recent(self, count: int) -> Tokens:
        """Return the last `count` frames of this turn for the repetition rules, which exclude its first frame."""
        first = min(self.turn_start + 1, self.length)
        return self.tokens[max(first, self.length - count) : self.length]

    def discard_in_flight(self) -> None:
        """Invalidate the frames that the device is generating for this sequence."""
        self.planned = self.length
        self.bound = False
        self.epoch += 1

    def reset_kv(self) -> None:
        """Forget the KV blocks; all tokens are recomputed, to the same result."""
        self.discard_in_flight()
        self.blocks, self.computed, self.committed, self.sealed = [], 0, 0, 0

    def clear(self) -> None:
        """Drop all tokens; the slot stays."""
        self.length = 0
        self.keys.clear()

    def extend_keys(self, size: int) -> None:
        """Hash the full blocks of known tokens that have no key yet."""
        extend_keys(self.keys, self.tokens[: self.length], size)
