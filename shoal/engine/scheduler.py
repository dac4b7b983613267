"""What the next step computes: who starts, who goes on, who has to give way.

Pure bookkeeping, no tensors. The promise behind every line: a block has one writer, every sequence ends exactly
once, and whoever is preempted comes back and is computed to the same result.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.engine.blocks import BlockPool
from shoal.engine.memory.concurrency_limit import ConcurrencyLimit
from shoal.engine.policy import AdmissionPolicy, Continuous
from shoal.engine.sequence import Sequence, Tokens
from shoal.errors import InvalidRequest
from shoal.speech import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Prefill:
    """Known tokens [start, end) of a sequence; with `samples_frame`, a frame follows the last of them."""

    sequence: Sequence
    epoch: int
    start: int
    end: int
    samples_frame: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. Rows that draw a frame: the prefills that say so, then all decodes."""

    prefills: list[Prefill] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)  # of the decodes, when they were planned

    def __bool__(self) -> bool:
        return bool(self.prefills or self.decodes)

    def sequences(self) -> list[Sequence]:
        return [prefill.sequence for prefill in self.prefills] + self.decodes

    def sampled(self) -> list[tuple[Sequence, int]]:
        firsts = [(prefill.sequence, prefill.epoch) for prefill in self.prefills if prefill.samples_frame]
        return firsts + list(zip(self.decodes, self.epochs, strict=True))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step drew: tokens [rows, 1 + codebooks], rows as in `batch.sampled()`."""

    batch: Batch
    tokens: Tokens

    @classmethod
    def nothing(cls, batch: Batch) -> "StepOutput":
        return cls(batch, np.zeros((0, 1), np.int32))


@dataclass(frozen=True, slots=True)
class Progress:
    """A sequence that has new frames, or has ended its turn, or both."""

    sequence: Sequence
    frames: int


@dataclass(slots=True)
class SchedulerStats:
    admitted: int = 0
    finished: int = 0
    cancelled: int = 0
    preempted: int = 0


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        *,
        slots: int,
        token_budget: int,
        stop_id: int,
        max_tokens: int,
        policy: AdmissionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.stop_id = stop_id
        self.token_budget = token_budget
        self.policy = policy or Continuous()
        self.clock = clock
        self.stats = SchedulerStats()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.tables: NDArray[np.int32] = np.zeros((slots, pool.needed(max_tokens + 1)), np.int32)
        self.concurrency = ConcurrencyLimit(slots, clock)
        self._free_slots = list(reversed(range(slots)))
        self._since: dict[int, float] = {}
        self._arrivals = 0

    @property
    def active(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. One that could never fit is refused here rather than left to wait for ever."""
        if not self.fits(sequence.length, sequence.sampling, sequence.most):
            raise InvalidRequest(
                f"a prompt of {sequence.length} tokens and its frames may not fit the KV memory of "
                f"{self.pool.count * self.pool.size}: shorten the text or lower max_frames"
            )
        self.waiting.append(sequence)
        self._since[sequence.id] = self.clock()

    def fits(self, prompt: int, sampling: SamplingParams, most: int) -> bool:
        """Whether a turn with this prompt could run to its end if it had the memory to itself."""
        longest = min(most, prompt + sampling.max_frames) if sampling.max_frames else most
        return self.pool.needed(longest) <= self.pool.count

    def plan(self, alone: Sequence | None = None) -> Batch:
        """Decide the next step and count it as done: what it computes is in memory for whoever is planned next.

        With `alone`, that sequence is all there is to the step.
        """
        self._start_waiting()
        # Memory that others hold may keep the lone one from starting; then they have to go on first.
        eligible = [alone] if alone in self.running else list(self.running)
        decodes = self._plan_decodes(eligible)
        # A prompt always gets on, however many voices run: they may never become fewer.
        prefills = self._plan_prefills(eligible, max(1, self.token_budget - len(decodes)))
        # Making room for one may have set back another that was already planned; its epoch tells.
        kept = [(sequence, epoch) for sequence, epoch in decodes if sequence.epoch == epoch]
        return Batch(
            [prefill for prefill in prefills if prefill.sequence.epoch == prefill.epoch],
            [sequence for sequence, _ in kept],
            [epoch for _, epoch in kept],
        )

    def commit(self, drawn: StepOutput) -> list[Progress]:
        """Take in what a step drew; frames of sequences that have since ended or been set back are dropped."""
        progress = []
        mains = drawn.tokens[:, 0].tolist()
        for row, (sequence, epoch) in enumerate(drawn.batch.sampled()):
            if sequence.epoch == epoch:
                progress.append(self._take_in(sequence, drawn.tokens[row], mains[row]))
        for prefill in drawn.batch.prefills:
            self._seal(prefill.sequence)
        return progress

    def release(self, sequence: Sequence) -> None:
        """The sequence is over: everything it holds goes back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release_blocks(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        self._since.pop(sequence.id, None)
        self.stats.finished += sequence.finish is not FinishReason.CANCELLED
        self.stats.cancelled += sequence.finish is FinishReason.CANCELLED

    def cancel(self, sequence: Sequence) -> None:
        sequence.finish = FinishReason.CANCELLED
        sequence.epoch += 1
        self.release(sequence)

    def restart(self, sequence: Sequence, prompt: Tokens, sampling: SamplingParams) -> None:
        """Speak from another prompt in the same slot, as soon as there is room: others came later."""
        self.requeue(sequence)
        sequence.clear()
        sequence.begin_turn(prompt, sampling)

    def requeue(self, sequence: Sequence) -> None:
        """Take a running sequence's memory; it waits in front of the queue and is computed again."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release_blocks(sequence)
            self.waiting.appendleft(sequence)
            self._since.setdefault(sequence.id, self.clock())
        sequence.reset_kv()

    def _plan_decodes(self, eligible: list[Sequence]) -> list[tuple[Sequence, int]]:
        planned = []
        for sequence in eligible:
            if not sequence.decoding or sequence.exhausted or sequence.finish is not None:
                continue
            if self._make_room(sequence, sequence.computed + 1):
                sequence.computed += 1
                sequence.planned += 1
                planned.append((sequence, sequence.epoch))
        return planned

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Memory for `tokens` tokens, taken from the youngest if need be; False if that was the sequence itself."""
        while len(sequence.blocks) * self.pool.size < tokens:
            if not self.pool.available:
                youngest = max(self.running, key=lambda other: other.arrived)
                self._preempt(youngest)
                if youngest is sequence:
                    return False
            else:
                self._give_block(sequence, self.pool.take())
        return True

    def _start_waiting(self) -> None:
        if not self.waiting:
            return
        oldest = self.clock() - self._since[self.waiting[0].id]
        # Whoever was preempted has a slot and has been admitted once; no policy holds it up again.
        quota = self.policy.quota(len(self.waiting), len(self.running), oldest)
        if len(self.running) >= self.concurrency.most:
            self.concurrency.ask()
        while self.waiting and len(self.running) < self.concurrency.most and (quota > 0 or self.waiting[0].slot >= 0):
            quota -= self.waiting[0].slot < 0
            if not self._start(self.waiting[0]):
                return
            self.running.append(self.waiting.popleft())

    def _start(self, sequence: Sequence) -> bool:
        """Give a sequence its slot and the memory of its known tokens; False if there is not enough of either."""
        if sequence.slot < 0 and not self._free_slots:
            return False
        sequence.extend_keys(self.pool.size)
        # The last token is always computed, since the frame is drawn from it.
        shareable = sequence.keys[: (sequence.length - 1) // self.pool.size]
        wanted = self.pool.needed(sequence.length + 1)
        # Asked before anything is touched: whoever has to wait here is asked again at every step.
        if wanted - self.pool.in_use(shareable) > self.pool.available:
            return False
        shared = self.pool.match(shareable)
        self._admit(sequence, shared, wanted - len(shared))
        return True

    def _admit(self, sequence: Sequence, shared: list[int], wanted: int) -> None:
        if sequence.slot < 0:
            sequence.slot = self._free_slots.pop()
            sequence.arrived = self._arrivals
            self._arrivals += 1
            self.stats.admitted += 1
        for block in shared:
            self._give_block(sequence, block)
        for _ in range(wanted):
            self._give_block(sequence, self.pool.take())
        sequence.computed = len(shared) * self.pool.size
        sequence.sealed = len(shared)

    def _plan_prefills(self, eligible: list[Sequence], budget: int) -> list[Prefill]:
        prefills = []
        for sequence in eligible:
            todo = sequence.length - sequence.computed
            if budget <= 0 or todo <= 0 or sequence.planned > sequence.length or sequence.decoding:
                continue
            # A sequence without blocks was set back since, or has not started.
            if sequence.finish is not None or not sequence.blocks or not self._make_room(sequence, sequence.length):
                continue
            prefills.append(self._prefill(sequence, min(todo, budget)))
            budget -= min(todo, budget)
        return prefills

    def _prefill(self, sequence: Sequence, tokens: int) -> Prefill:
        start, end = sequence.computed, sequence.computed + tokens
        sequence.computed = end
        samples_frame = end == sequence.length
        if samples_frame:
            sequence.planned += 1
            sequence.bound = True
        return Prefill(sequence, sequence.epoch, start, end, samples_frame)

    def _take_in(self, sequence: Sequence, token: Tokens, main: int) -> Progress:
        if main == self.stop_id:
            sequence.finish = FinishReason.STOP
            sequence.epoch += 1
            return Progress(sequence, 0)
        sequence.append(token)
        most = sequence.sampling.max_frames
        if sequence.length >= sequence.most or (most > 0 and sequence.frames >= most):
            sequence.finish = FinishReason.LENGTH
            sequence.epoch += 1
        if sequence.length % self.pool.size == 0:
            self._seal(sequence)
        return Progress(sequence, 1)

    def _seal(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full, computed and known."""
        sequence.extend_keys(self.pool.size)
        full = min(len(sequence.keys), sequence.computed // self.pool.size, len(sequence.blocks))
        for index in range(sequence.sealed, full):
            self.pool.seal(sequence.blocks[index], sequence.keys[index])
        sequence.sealed = max(sequence.sealed, full)

    def _preempt(self, sequence: Sequence) -> None:
        self.requeue(sequence)
        self.stats.preempted += 1

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _give_block(self, sequence: Sequence, block: int) -> None:
        self.tables[sequence.slot, len(sequence.blocks)] = block
        sequence.blocks.append(block)
