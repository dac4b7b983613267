"""A fake device that checks the invariants of the scheduler.

A cache location holds the hash of all tokens up to it. Every computed token must find the hashes of its own past at the
locations of its block table, so a block that was shared wrongly, allocated twice or written by another sequence is
detected by the first token that attends to it. Frames are a function of that past, the seed and the frame number.
"""

from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from shoal.engine.scheduling.scheduler import Batch, Progress, Scheduler, StepOutput
from shoal.engine.scheduling.sequence import Sequence, Tokens
from shoal.speech import FinishReason, SamplingParams

STOP_ID = 9
START = b"start"


def advance(past: bytes, token: Tokens) -> bytes:
    return blake2b(past + token.astype(np.int32).tobytes(), digest_size=8).digest()


def sample_token(past: bytes, seed: int, frame: int) -> Tokens:
    """Return one token [2]; about one of 25 is a stop token."""
    roll = int.from_bytes(blake2b(past + bytes([seed, frame % 256]), digest_size=4).digest(), "little")
    return np.array([STOP_ID if roll % 25 == 0 else 100 + roll % 50, roll % 50], np.int32)


def alone(prompt: Tokens, sampling: SamplingParams, max_tokens: int) -> tuple[Tokens, FinishReason]:
    """Return the frames [n, 2] of a prompt that runs alone."""
    past = START
    for token in prompt:
        past = advance(past, token)
    frames: list[Tokens] = []
    budget = min(sampling.max_frames or max_tokens, max_tokens - len(prompt))
    while len(frames) < budget:
        token = sample_token(past, sampling.seed, len(frames))
        if token[0] == STOP_ID:
            return np.array(frames, np.int32).reshape(-1, 2), FinishReason.STOP
        frames.append(token)
        past = advance(past, token)
    return np.array(frames, np.int32).reshape(-1, 2), FinishReason.LENGTH


@dataclass(slots=True)
class Cell:
    past: bytes = b""  # hash of everything before this token
    here: bytes = b""  # hash including this token


@dataclass
class CheckingDevice:
    """Runs batches in order, as a CUDA stream would, and returns their output `lag` steps later."""

    scheduler: Scheduler
    lag: int = 0
    cells: dict[int, Cell] = field(default_factory=dict)
    newest: dict[int, Tokens] = field(default_factory=dict)  # by slot, as are the two below
    seeds: dict[int, int] = field(default_factory=dict)
    frames: dict[int, int] = field(default_factory=dict)
    pending: deque[StepOutput] = field(default_factory=deque)
    _before: deque[dict[int, Cell]] = field(default_factory=deque)  # cells before each pending step

    def step(self) -> list[Progress]:
        """Plan, run, and commit the oldest finished step."""
        self.launch(self.scheduler.plan())
        output = self.finished()
        return [] if output is None else self.scheduler.commit(output)

    def launch(self, batch: Batch) -> None:
        """Run a batch as the backends with fixed sizes do: all prompts up to their last tokens, then these."""
        self._before.append(dict(self.cells))
        sampled = [prefill for prefill in batch.prefills if prefill.samples_frame]
        for prefill in sampled:
            slot = prefill.sequence.slot
            self.seeds[slot], self.frames[slot] = prefill.sequence.sampling.seed, prefill.sequence.frames
        for each in batch.prefills:
            self._prefill(each.sequence, each.start, each.end - each.samples_frame)
        ends = [self._prefill(each.sequence, each.end - 1, each.end) for each in sampled]
        ends += [self._decode(sequence) for sequence in batch.decodes]
        slots = [sequence.slot for sequence, _ in batch.sampled()]
        sampled_tokens = [self._sample(slot, end) for slot, end in zip(slots, ends, strict=True)]
        self.pending.append(StepOutput(batch, np.array(sampled_tokens, np.int32).reshape(-1, 2)))

    def finished(self) -> StepOutput | None:
        """Return the oldest finished step; None until `lag` steps are in flight."""
        return self.collect() if len(self.pending) > self.lag else None

    def collect(self) -> StepOutput:
        """Return the oldest step in flight."""
        self._before.popleft()
        return self.pending.popleft()

    def fail(self) -> list[Batch]:
        """Lose the steps in flight and everything they wrote; return their batches."""
        lost = [output.batch for output in self.pending]
        if lost:
            self.cells = self._before[0]
        self.pending.clear()
        self._before.clear()
        return lost

    def _prefill(self, sequence: Sequence, start: int, end: int) -> bytes:
        past = self._past(sequence.slot, start)
        for place in range(start, end):
            past = self._write(sequence.slot, place, past, sequence.tokens[place])
        return past

    def _decode(self, sequence: Sequence) -> bytes:
        place = sequence.computed - 1
        return self._write(sequence.slot, place, self._past(sequence.slot, place), self.newest[sequence.slot])

    def _sample(self, slot: int, past: bytes) -> Tokens:
        token = sample_token(past, self.seeds[slot], self.frames[slot])
        self.newest[slot] = token
        self.frames[slot] += 1
        return token

    def _write(self, slot: int, place: int, past: bytes, token: Tokens) -> bytes:
        here = advance(past, token)
        self.cells[self._address(slot, place)] = Cell(past, here)
        return here

    def _past(self, slot: int, place: int) -> bytes:
        """Return the hash of everything before `place`; every cell on the way back has to belong to the same past."""
        if place == 0:
            return START
        newest = expected = self.cells[self._address(slot, place - 1)].here
        for before in reversed(range(place)):
            cell = self.cells[self._address(slot, before)]
            assert cell.here == expected, f"token {before} of slot {slot} holds the past of another sequence"
            expected = cell.past
        assert expected == START, "the past does not reach back to the first token"
        return newest

    def _address(self, slot: int, place: int) -> int:
        size = self.scheduler.pool.size
        return int(self.scheduler.tables[slot, place // size]) * size + place % size
