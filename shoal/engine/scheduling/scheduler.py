"""Continuous-batching scheduler: admission, chunked prefill, decode, and preemption by recompute.

Pure bookkeeping without tensors. Invariants: a block has one writer, every sequence ends exactly once, and a preempted
sequence is recomputed to the same result.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.config import DEFAULT_TOKEN_BUDGET
from shoal.engine.memory.concurrency_limit import ConcurrencyLimit
from shoal.engine.scheduling.blocks import BlockPool
from shoal.engine.scheduling.fair_queue import FairQueue
from shoal.engine.scheduling.policy import AdmissionPolicy, Continuous
from shoal.engine.scheduling.prefixes_in_flight import PrefixesInFlight
from shoal.engine.scheduling.sequence import Sequence, Tokens
from shoal.errors import InvalidRequest
from shoal.speech import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Prefill:
    """Known tokens [start, end) of a sequence; with `samples_frame`, a frame is sampled after the last of them."""

    sequence: Sequence
    epoch: int
    start: int
    end: int
    samples_frame: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Work of one step. Rows that sample a frame: prefills with `samples_frame`, then all decodes."""

    prefills: list[Prefill] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)  # epochs of the decodes when they were planned

    def __bool__(self) -> bool:
        return bool(self.prefills or self.decodes)

    def sequences(self) -> list[Sequence]:
        return [prefill.sequence for prefill in self.prefills] + self.decodes

    def sampled(self) -> list[tuple[Sequence, int]]:
        firsts = [(prefill.sequence, prefill.epoch) for prefill in self.prefills if prefill.samples_frame]
        return firsts + list(zip(self.decodes, self.epochs, strict=True))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Sampled tokens [rows, 1 + codebooks] of a step, rows as in `batch.sampled()`."""

    batch: Batch
    tokens: Tokens
    # By row of a sequence that has a text span: origins of the path through the text, or recorded attention weights.
    attention: Mapping[int, NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def empty(cls, batch: Batch) -> "StepOutput":
        return cls(batch, np.zeros((0, 1), np.int32))


@dataclass(frozen=True, slots=True)
class Progress:
    """A sequence with `frames` new frames, or that has ended its turn, or both."""

    sequence: Sequence
    frames: int
    attention: NDArray[Any] | None = None  # what was read of the new frame, as in `StepOutput`


@dataclass(slots=True)
class SchedulerStats:
    admitted: int = 0
    finished: int = 0
    cancelled: int = 0
    preempted: int = 0


# Maximum duration of a prefill-only step, in frames of audio: together with the steps before and after it, running
# streams wait less than one frame, so playback does not underrun.
FRAME_PAUSE = 0.5
# There are no prefill-only steps on a device that takes longer than this for a full token budget.
MAX_PAUSING_PREFILL_SECONDS = 0.016

# Prompt tokens that a step may compute per decode: a step of many sequences takes longer, so more prompt tokens delay
# it by the same share. One per BUDGET_PER_DECODE tokens of budget if that is more: a large budget means a fast GPU.
MIN_PREFILL_PER_DECODE = 2
BUDGET_PER_DECODE = 256


def burst_tokens(frame_rate: float, token_budget: int, token_seconds: float, limit: int | None = None) -> int:
    """Return the maximum prompt tokens of a prefill-only step: as many as the device computes in FRAME_PAUSE frames.

    0 disables such steps: where prefill is too slow, running streams would underrun. `limit` is the token budget that
    the operator has set; None: it was measured.
    """
    if not 0 < token_budget * token_seconds <= MAX_PAUSING_PREFILL_SECONDS:
        return 0
    tokens = FRAME_PAUSE / frame_rate / token_seconds
    # Rounded to multiples of the default budget, the size of the largest regular prompt graph.
    rounded = round(tokens / DEFAULT_TOKEN_BUDGET) * DEFAULT_TOKEN_BUDGET
    return limit or max(token_budget, rounded)


def _prompt_tokens(sequence: Sequence) -> int:
    """Return the number of prompt tokens still to be planned, except the last, which is computed with a frame."""
    prefilling = sequence.blocks and not sequence.decoding and sequence.finish is None
    return max(0, sequence.length - 1 - sequence.computed) if prefilling else 0


def prefill_budget(token_budget: int, decodes: int) -> int:
    """Return the prompt tokens that a step may compute beside `decodes` frames."""
    return max(token_budget, max(MIN_PREFILL_PER_DECODE, token_budget // BUDGET_PER_DECODE) * decodes)


class Scheduler:
    """Waiting and running sequences, their slots and KV blocks. Not thread-safe."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        slots: int,
        token_budget: int,
        stop_id: int,
        max_tokens: int,
        burst_tokens: int = 0,
        policy: AdmissionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`burst_tokens` is the limit of a prefill-only step; with 0 every step also decodes.

        While more prompt tokens wait than one step computes, as in a burst, every second step is prefill-only.
        """
        self.pool = pool
        self.stop_id = stop_id
        self.token_budget = token_budget
        self.burst_tokens = burst_tokens
        self.policy = policy or Continuous()
        self.clock = clock
        self.stats = SchedulerStats()
        self.waiting = FairQueue()
        self.running: list[Sequence] = []  # in order of admission
        self.tables: NDArray[np.int32] = np.zeros((slots, pool.needed(max_tokens + 1)), np.int32)
        self.concurrency = ConcurrencyLimit(slots, clock)
        self._free_slots = list(reversed(range(slots)))
        self._waiting_since: dict[int, float] = {}
        self._arrivals = 0
        self._postponed = False  # whether the last plan was prefill-only
        self._prefixes = PrefixesInFlight()

    @property
    def active(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises InvalidRequest for one that can never fit, instead of letting it wait forever."""
        if not self.fits(sequence.length, sequence.sampling, sequence.max_length):
            raise InvalidRequest(
                f"a prompt of {sequence.length} tokens and its frames do not fit the KV cache of "
                f"{self.pool.count * self.pool.size} tokens: shorten the text or lower max_frames"
            )
        self.waiting.add(sequence)
        self._waiting_since[sequence.id] = self.clock()

    def fits(self, prompt: int, sampling: SamplingParams, max_length: int) -> bool:
        """Return whether a turn with `prompt` tokens of prompt could run to its end alone in the KV cache."""
        longest = min(max_length, prompt + sampling.max_frames) if sampling.max_frames else max_length
        return self.pool.needed(longest) <= self.pool.count

    def longest_prompt(self, sampling: SamplingParams, max_length: int) -> int:
        """Return the longest prompt for which `fits` is true, in tokens; 0 if none is."""
        room = self.pool.count * self.pool.size
        if room >= max_length:
            return max_length
        return max(0, room - sampling.max_frames) if sampling.max_frames else 0

    def plan(self, alone: Sequence | None = None) -> Batch:
        """Return the next batch and advance its sequences as if it had run: the next plan does not wait for its end.

        With `alone`, the batch holds only that sequence.
        """
        self._prefixes.begin_plan()
        self._admit_waiting()
        # If memory held by others keeps `alone` from starting, they have to run first.
        eligible = [alone] if alone in self.running else list(self.running)
        ready = [each for each in eligible if each.decoding and not each.exhausted and each.finish is None]
        budget = self.prefill_budget(len(ready))
        if self._postpone_frames(eligible, budget):
            budget = max(budget, self.burst_tokens)
        sampling = not self._postponed
        decodes = self._plan_decodes(ready) if sampling else []
        prefills = self._plan_prefills(eligible, budget, sampling=sampling)
        while borrowers := self._prefixes.invalid_borrowers():
            self._preempt(borrowers[0])
        # Reserving a block may have preempted a sequence that was already planned; its epoch has changed then.
        valid = [(sequence, epoch) for sequence, epoch in decodes if sequence.epoch == epoch]
        return Batch(
            [prefill for prefill in prefills if prefill.sequence.epoch == prefill.epoch],
            [sequence for sequence, _ in valid],
            [epoch for _, epoch in valid],
        )

    def prefill_budget(self, decodes: int) -> int:
        """Return the prompt tokens that a step with this many decodes may compute.

        Decodes do not count against the budget: otherwise a batch as large as the budget would starve new requests.
        They raise it, except after a prefill-only step: together the two steps must take less than a frame.
        """
        return self.token_budget if self._postponed else prefill_budget(self.token_budget, decodes)

    def commit(self, output: StepOutput) -> list[Progress]:
        """Append the frames of a step; frames of sequences that have ended or been preempted since are dropped."""
        self._commit_kv(output.batch)
        progress = []
        semantic = output.tokens[:, 0].tolist()
        for row, (sequence, epoch) in enumerate(output.batch.sampled()):
            if sequence.epoch == epoch:
                frames = self._append_frame(sequence, output.tokens[row], semantic[row])
                progress.append(Progress(sequence, frames, output.attention.get(row)))
        return progress

    def release(self, sequence: Sequence) -> None:
        """Release the slot and blocks of a sequence that has ended."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release_blocks(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        self._waiting_since.pop(sequence.id, None)
        self.stats.finished += sequence.finish is not FinishReason.CANCELLED
        self.stats.cancelled += sequence.finish is FinishReason.CANCELLED

    def cancel(self, sequence: Sequence) -> None:
        sequence.finish = FinishReason.CANCELLED
        sequence.epoch += 1
        self.release(sequence)

    def restart(self, sequence: Sequence, prompt: Tokens, sampling: SamplingParams) -> None:
        """Replace the prompt; the sequence keeps its slot and waits at the front of the queue."""
        self.requeue(sequence)
        sequence.clear()
        sequence.begin_turn(prompt, sampling)

    def rewind_turn(self, sequence: Sequence, sampling: SamplingParams, kept_frames: int = 0) -> None:
        """Keep the first frames of the current turn; the sequence keeps its slot and is next in the queue."""
        self.requeue(sequence)
        sequence.rewind_turn(sampling, self.pool.size, kept_frames)

    def requeue(self, sequence: Sequence) -> None:
        """Release the blocks of a running sequence and put it at the front of the queue, to be recomputed."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release_blocks(sequence)
            self.waiting.add_preempted(sequence)
            self._waiting_since.setdefault(sequence.id, self.clock())
        sequence.reset_kv()

    def _postpone_frames(self, eligible: list[Sequence], budget: int) -> bool:
        """Return whether this step is prefill-only: more prompt tokens wait than `budget`, and the last step was not.

        A step that samples takes nearly as long for few sequences as for many, so the first frames of a burst come
        sooner if all its prompts are computed first. Running streams are ahead of playback and decode in the next step.
        """
        allowed = self.burst_tokens > 0 and not self._postponed
        self._postponed = allowed and sum(map(_prompt_tokens, eligible)) > budget
        return self._postponed

    def _plan_decodes(self, ready: list[Sequence]) -> list[tuple[Sequence, int]]:
        planned = []
        for sequence in ready:
            # `bound` is false if an earlier iteration preempted this sequence to take its blocks.
            if sequence.bound and self._reserve(sequence, sequence.computed + 1):
                sequence.computed += 1
                sequence.planned += 1
                planned.append((sequence, sequence.epoch))
        return planned

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate blocks for `tokens` tokens, preempting the latest sequences; False if it preempted itself."""
        while len(sequence.blocks) * self.pool.size < tokens:
            if not self.pool.available:
                latest = max(self.running, key=lambda other: other.arrived)
                self._preempt(latest)
                if latest is sequence:
                    return False
            else:
                self._append_block(sequence, self.pool.take())
        return True

    def _admit_waiting(self) -> None:
        if not self.waiting:
            return
        oldest = self.clock() - self._waiting_since[self.waiting.first.id]
        # Preempted sequences keep their slot and are not subject to the admission policy again.
        quota = self.policy.quota(len(self.waiting), len(self.running), oldest)
        if len(self.running) >= self.concurrency.limit:
            self.concurrency.maybe_grow()
        while self.waiting and len(self.running) < self.concurrency.limit:
            first = self.waiting.first
            new = first.slot < 0
            if (new and quota <= 0) or not self._start(first):
                return
            quota -= new
            self.running.append(self.waiting.pop())

    def _start(self, sequence: Sequence) -> bool:
        """Assign a slot and the blocks of the known tokens; False if either is not available."""
        if sequence.slot < 0 and not self._free_slots:
            return False
        sequence.extend_keys(self.pool.size)
        # The last token is always computed, because the next frame is sampled from its logits.
        shareable = sequence.keys[: (sequence.length - 1) // self.pool.size]
        needed = self.pool.needed(sequence.length + 1)
        # Checked before anything is changed, because a waiting sequence is tried again at every step.
        if needed - self.pool.in_use(shareable) > self.pool.available:
            return False
        shared = self.pool.match(shareable)
        self._admit(sequence, shared, needed - len(shared))
        return True

    def _admit(self, sequence: Sequence, shared: list[int], needed: int) -> None:
        if sequence.slot < 0:
            sequence.slot = self._free_slots.pop()
            sequence.arrived = self._arrivals
            self._arrivals += 1
            self.stats.admitted += 1
        for block in shared:
            self._append_block(sequence, block)
        for _ in range(needed):
            self._append_block(sequence, self.pool.take())
        sequence.computed = sequence.committed = len(shared) * self.pool.size
        sequence.sealed = len(shared)

    def _plan_prefills(self, eligible: list[Sequence], budget: int, *, sampling: bool) -> list[Prefill]:
        """Plan prompt tokens; without `sampling` all but the last of each prompt, which samples a frame."""
        prefills = []
        for sequence in eligible:
            end = sequence.length - (not sampling)
            todo = end - sequence.computed
            if budget <= 0 or todo <= 0 or sequence.planned > sequence.length or sequence.decoding:
                continue
            # A sequence without blocks was preempted in this plan, or has not started.
            if sequence.finish is not None or not sequence.blocks or not self._reserve(sequence, sequence.length):
                continue
            self._share_prefix(sequence, end - 1)
            tokens = min(end - sequence.computed, budget)
            prefills.append(self._prefill(sequence, tokens))
            budget -= tokens
        return prefills

    def _share_prefix(self, sequence: Sequence, end: int) -> None:
        """Skip prompt tokens before `end` that other sequences have computed since admission, or compute in flight.

        The plan must compute the token at `end`: a sequence that shares blocks in flight has to be in the batch, so
        that it is recomputed if the step fails.
        """
        size, first = self.pool.size, sequence.computed // self.pool.size
        sequence.extend_keys(size)
        if not self.pool.caching or sequence.computed % size:
            return
        for index in range(first, end // size):
            block = self._computed_block(sequence, index)
            if block is None:
                break
            self.pool.release([sequence.blocks[index]])
            sequence.blocks[index] = self.tables[sequence.slot, index] = block
            sequence.computed += size
        self.pool.record_saved(sequence.computed - first * size, new_hit=first == 0)

    def _computed_block(self, sequence: Sequence, index: int) -> int | None:
        """Reference and return a block of another sequence with the tokens of this one; None if there is none."""
        key = sequence.keys[index]
        block = self.pool.share(key)
        if block is None and (block := self._prefixes.borrow(key, sequence)) is not None:
            self.pool.reference(block)
        return block

    def _prefill(self, sequence: Sequence, tokens: int) -> Prefill:
        start, end = sequence.computed, sequence.computed + tokens
        sequence.computed = end
        if self.pool.caching:
            self._prefixes.add(sequence, start, end, self.pool.size)
        samples_frame = end == sequence.length
        if samples_frame:
            sequence.planned += 1
            sequence.bound = True
        return Prefill(sequence, sequence.epoch, start, end, samples_frame)

    def _append_frame(self, sequence: Sequence, token: Tokens, semantic: int) -> int:
        """Append a sampled frame, or end the sequence at the stop token; return the number of new frames."""
        if semantic == self.stop_id:
            sequence.finish = FinishReason.STOP
            sequence.epoch += 1
            return 0
        sequence.append(token)
        max_frames = sequence.sampling.max_frames
        if sequence.length >= sequence.max_length or (max_frames > 0 and sequence.frames >= max_frames):
            sequence.finish = FinishReason.LENGTH
            sequence.epoch += 1
        return 1

    def _commit_kv(self, batch: Batch) -> None:
        """Count the tokens whose keys and values a finished step has written, and seal the blocks they fill.

        Tokens of steps in flight do not count: if such a step fails, the content of its blocks is undefined.
        """
        for prefill in batch.prefills:
            if prefill.sequence.epoch == prefill.epoch:
                prefill.sequence.committed = prefill.end
                self._seal(prefill.sequence)
        for sequence, epoch in zip(batch.decodes, batch.epochs, strict=True):
            if sequence.epoch == epoch:
                sequence.committed += 1
                if sequence.committed % self.pool.size == 0:
                    self._seal(sequence)

    def _seal(self, sequence: Sequence) -> None:
        """Register blocks that are full and committed in the prefix cache."""
        sequence.extend_keys(self.pool.size)
        full = min(len(sequence.keys), sequence.committed // self.pool.size, len(sequence.blocks))
        for index in range(sequence.sealed, full):
            self.pool.seal(sequence.blocks[index], sequence.keys[index])
        sequence.sealed = max(sequence.sealed, full)

    def _preempt(self, sequence: Sequence) -> None:
        self.requeue(sequence)
        self.stats.preempted += 1

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _append_block(self, sequence: Sequence, block: int) -> None:
        self.tables[sequence.slot, len(sequence.blocks)] = block
        sequence.blocks.append(block)
