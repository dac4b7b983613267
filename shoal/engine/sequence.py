"""One live voice: its tokens, where it stands, and what it holds.

Tokens of a sequence, with the host up to one step behind the device:

    |<------ prompt ------>|<- frames of this turn ->|<- in flight ->|
    0                    turn_start                     length         planned
    |<-- computed: keys and values are in memory, or will be when the step that is under way ends -->|
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.engine.blocks import ROOT, Key, block_key
from shoal.speech import FinishReason, SamplingParams

Tokens = NDArray[np.int32]  # [length, 1 + codebooks]


@dataclass(slots=True, eq=False)
class Sequence:
    id: int
    sampling: SamplingParams
    most: int  # tokens this sequence may ever have
    tokens: Tokens
    length: int = 0
    turn_start: int = 0
    planned: int = 0
    computed: int = 0
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)  # of all full blocks of known tokens
    sealed: int = 0  # how many of them the pool knows
    bound: bool = False  # the device knows this slot's newest token
    epoch: int = 0  # raised whenever what is in flight has become worthless
    arrived: int = 0  # order of admission; the youngest is preempted first
    finish: FinishReason | None = None

    @classmethod
    def start(cls, id: int, prompt: Tokens, sampling: SamplingParams, most: int) -> "Sequence":
        """A sequence that has its prompt [T, 1 + codebooks] and nothing else."""
        sequence = cls(id, sampling, most, np.zeros((max(len(prompt), 64), prompt.shape[1]), np.int32))
        sequence.begin_turn(prompt, sampling)
        return sequence

    @property
    def frames(self) -> int:
        """Frames of this turn that the host knows."""
        return self.length - self.turn_start

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is to be computed, and the device has it."""
        return self.bound and self.planned - self.computed == 1

    @property
    def exhausted(self) -> bool:
        """Whether as many frames are planned as this turn may have."""
        most = self.sampling.max_frames
        return self.planned >= self.most or (most > 0 and self.planned - self.turn_start >= most)

    def begin_turn(self, prompt: Tokens, sampling: SamplingParams) -> None:
        """What has been said so far and `prompt` lead to what is said next."""
        self.extend(prompt)
        self.sampling = sampling
        self.turn_start = self.planned = self.length
        self.computed = min(self.computed, self.length - len(prompt))
        self.finish = None
        self.discard_in_flight()

    def extend(self, tokens: Tokens) -> None:
        need = self.length + len(tokens)
        if need > len(self.tokens):
            grown = np.zeros((max(need, 2 * len(self.tokens)), self.tokens.shape[1]), np.int32)
            grown[: self.length] = self.tokens[: self.length]
            self.tokens = grown
        self.tokens[self.length : need] = tokens
        self.length = need

    def append(self, token: Tokens) -> None:
        """One more known token; the hot path of `extend`."""
        if self.length == len(self.tokens):
            self.tokens = np.concatenate((self.tokens, np.zeros_like(self.tokens)))
        self.tokens[self.length] = token
        self.length += 1

    def recent(self, most: int) -> Tokens:
        """The last `most` frames of this turn that repetition rules look at; its first frame is not among them."""
        first = min(self.turn_start + 1, self.length)
        return self.tokens[max(first, self.length - most) : self.length]

    def discard_in_flight(self) -> None:
        """What the device is drawing for this sequence no longer counts."""
        self.planned = self.length
        self.bound = False
        self.epoch += 1

    def reset_kv(self) -> None:
        """The blocks are gone: everything is to be computed again, to the same result."""
        self.discard_in_flight()
        self.blocks, self.computed, self.sealed = [], 0, 0

    def clear(self) -> None:
        """Forget everything that was said; the slot stays."""
        self.length = 0
        self.keys.clear()

    def extend_keys(self, size: int) -> None:
        """Bring `keys` up to date with the known tokens."""
        while (len(self.keys) + 1) * size <= self.length:
            start = len(self.keys) * size
            before = self.keys[-1] if self.keys else ROOT
            self.keys.append(block_key(before, self.tokens[start : start + size]))
