"""Invariants of the scheduler, checked over random command sequences from hypothesis.

`CheckingDevice` runs what is planned at once and hands the frames over `lag` steps later, as a runner does that keeps
the device one step ahead of the host. It notices when a sequence reads memory that is not its own.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.engine.scheduling.blocks import BlockPool
from shoal.engine.scheduling.policy import AdmissionPolicy, Continuous, Dynamic, Static
from shoal.engine.scheduling.scheduler import Batch, Prefill, Progress, Scheduler, prefill_budget
from shoal.engine.scheduling.sequence import Sequence, Tokens
from shoal.errors import InvalidRequest
from shoal.speech import FinishReason, SamplingParams
from tests.engine.clock import FakeClock
from tests.engine.device import STOP_ID, CheckingDevice, alone

SIZE = 4  # tokens per block
MAX_LENGTH = 40  # tokens per sequence
VOICES = [np.arange(2 * n, dtype=np.int32).reshape(n, 2) + 1000 * n for n in (5, 9, 14)]
OWN = np.arange(8, dtype=np.int32).reshape(4, 2) + 500


@dataclass
class TrackedSequence:
    """A sequence, its request, and the frames the scheduler produced."""

    sequence: Sequence
    prompt: Tokens  # all tokens before the frames of this turn
    tails: list[Tokens]  # continuations of the remaining turns
    frames: list[Tokens] = field(default_factory=list)  # of this turn

    def check(self) -> None:
        """Check that the frames equal those of a sequence that runs alone."""
        expected, finish = alone(self.prompt, self.sequence.sampling, MAX_LENGTH)
        assert np.array_equal(np.array(self.frames, np.int32).reshape(-1, 2), expected)
        assert self.sequence.finish is finish


class SchedulerMachine(RuleBasedStateMachine):
    lag = 0

    @initialize(
        blocks=st.integers(10, 20),
        slots=st.integers(1, 6),
        budget=st.sampled_from([1, 3, 7, 64]),
        caching=st.booleans(),
        policy=st.sampled_from([Continuous(), Dynamic(2, 0.05), Static(3)]),
        burst_tokens=st.sampled_from([0, 20]),
    )
    def open(
        self, blocks: int, slots: int, budget: int, caching: bool, policy: AdmissionPolicy, burst_tokens: int
    ) -> None:
        self.clock = FakeClock()
        self.pool = BlockPool(blocks, SIZE, caching=caching)
        self.scheduler = Scheduler(
            self.pool,
            slots=slots,
            token_budget=budget,
            stop_id=STOP_ID,
            max_tokens=MAX_LENGTH,
            burst_tokens=burst_tokens,
            policy=policy,
            clock=self.clock,
        )
        self.slots = slots
        self.device = CheckingDevice(self.scheduler, self.lag)
        self.active: dict[int, TrackedSequence] = {}
        self.started = self.finished = self.cancelled = 0

    @rule(
        voice=st.sampled_from(VOICES),
        own=st.integers(0, 3),
        seed=st.integers(0, 5),
        max_frames=st.sampled_from([0, 1, 2, 9, 20]),
        tails=st.lists(st.integers(1, 4), max_size=2),
        times=st.integers(1, 3),
    )
    def arrive(self, voice: Tokens, own: int, seed: int, max_frames: int, tails: list[int], times: int) -> None:
        prompt = np.concatenate((voice, OWN[: 1 + own]))  # shorter prompts are prefixes of longer ones
        for time in range(times):
            sequence = Sequence.start(
                self.started, prompt, SamplingParams(seed=seed + time, max_frames=max_frames), MAX_LENGTH
            )
            self.started += 1
            self.scheduler.add(sequence)
            self.active[sequence.id] = TrackedSequence(
                sequence, prompt, [np.full((n, 2), 700 + n, np.int32) for n in tails]
            )

    @rule(seconds=st.sampled_from([0.0, 0.03, 0.1]), times=st.integers(1, 6))
    def step(self, seconds: float, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now += seconds
            for progress in self.device.step():
                self._collect(progress)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        talk = self._pick(data)
        self.scheduler.cancel(talk.sequence)
        self.cancelled += 1
        self._end(talk, FinishReason.CANCELLED)

    @precondition(lambda self: self.active)
    @rule(data=st.data(), seed=st.integers(0, 5), voice=st.sampled_from(VOICES))
    def restart(self, data: st.DataObject, seed: int, voice: Tokens) -> None:
        """Restart with another prompt and seed, as after a rejected output or a full context."""
        talk = self._pick(data)
        if talk.sequence.slot >= 0:
            sampling = SamplingParams(seed=seed, max_frames=talk.sequence.sampling.max_frames)
            self.scheduler.restart(talk.sequence, voice, sampling)
            talk.prompt = voice
            talk.frames.clear()

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        self.scheduler.requeue(self._pick(data).sequence)

    @rule()
    def fail(self) -> None:
        """Fail a step and those in flight: their sequences are requeued, and the first of them runs alone."""
        planned = self.scheduler.plan()
        lost = [sequence for batch in (*self.device.fail(), planned) for sequence in batch.sequences()]
        sequences = [each for each in dict.fromkeys(lost) if each.id in self.active and each.finish is None]
        for sequence in sorted(sequences, key=lambda each: each.arrived, reverse=True):
            self.scheduler.requeue(sequence)
        if sequences:
            first = sequences[0]
            lonely = self.scheduler.plan(alone=first)
            assert first not in self.scheduler.running or set(lonely.sequences()) <= {first}
            self.device.launch(lonely)
            for progress in self.scheduler.commit(self.device.collect()):
                self._collect(progress)

    @rule()
    def clear_cache(self) -> None:
        self.pool.clear_cache()

    @invariant()
    def every_block_is_free_or_used_or_cached(self) -> None:
        held = Counter(block for sequence in self.scheduler.running for block in sequence.blocks)
        assert self.pool.used == len(held)
        assert self.pool.available + self.pool.used == self.pool.count
        assert not held.keys() & self.pool._cached.keys()
        assert not held.keys() & set(self.pool._free)
        for block, count in held.items():
            assert count == self.pool._holders[block]
        for sequence in self.scheduler.running:
            for index, block in enumerate(sequence.blocks):
                full = sequence.computed >= (index + 1) * SIZE
                assert full or held[block] == 1, "only a block that is full, or will be after this step, is shared"

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        owned = [talk.sequence.slot for talk in self.active.values() if talk.sequence.slot >= 0]
        assert sorted(owned + self.scheduler._free_slots) == list(range(self.slots))
        assert {talk.sequence for talk in self.active.values()} == {*self.scheduler.running, *self.scheduler.waiting}

    @invariant()
    def every_row_of_the_tables_names_the_blocks(self) -> None:
        for sequence in self.scheduler.running:
            assert self.scheduler.tables[sequence.slot, : len(sequence.blocks)].tolist() == sequence.blocks

    @invariant()
    def every_sequence_knows_where_it_stands(self) -> None:
        for sequence in self.scheduler.running:
            assert (
                sequence.turn_start
                <= sequence.length
                <= sequence.planned
                <= min(sequence.length + 1 + self.lag, MAX_LENGTH + 1)
            )
            assert sequence.planned - sequence.turn_start <= (sequence.sampling.max_frames or MAX_LENGTH)
            assert sequence.computed <= sequence.planned
            assert sequence.computed <= len(sequence.blocks) * SIZE
            assert sequence.sealed <= min(len(sequence.blocks), len(sequence.keys))
        for sequence in self.scheduler.waiting:
            assert not sequence.blocks
            assert (sequence.computed, sequence.planned, sequence.bound) == (0, sequence.length, False)

    def teardown(self) -> None:
        if not hasattr(self, "active"):
            return
        # A bound: the oldest sequence progresses by at least one token per step, whatever is preempted for it.
        for _ in range(20 + 12 * MAX_LENGTH * (1 + len(self.active))):
            if not self.active:
                break
            self.step(0.1)
            self.every_block_is_free_or_used_or_cached()
        assert not self.active, "a sequence starves"
        while self.device.pending:
            assert not self.scheduler.commit(self.device.collect())
        assert (self.pool.used, self.scheduler.active, len(self.scheduler._waiting_since)) == (0, 0, 0)
        stats = self.scheduler.stats
        assert (stats.finished, stats.cancelled) == (self.finished, self.cancelled)
        assert stats.finished + stats.cancelled == self.started

    def _pick(self, data: st.DataObject) -> TrackedSequence:
        return self.active[data.draw(st.sampled_from(sorted(self.active)))]

    def _collect(self, progress: Progress) -> None:
        sequence = progress.sequence
        talk = self.active[sequence.id]
        if progress.frames:
            talk.frames.append(sequence.tokens[sequence.length - 1].copy())
        if sequence.finish is None:
            return
        talk.check()
        if talk.tails and sequence.length + len(talk.tails[0]) < MAX_LENGTH:
            self._next_turn(talk)
        else:
            self.scheduler.release(sequence)
            self.finished += 1
            self._end(talk, sequence.finish)

    def _next_turn(self, talk: TrackedSequence) -> None:
        said = np.array(talk.frames, np.int32).reshape(-1, 2)
        tail = talk.tails.pop(0)
        talk.prompt = np.concatenate((talk.prompt, said, tail))
        talk.frames.clear()
        talk.sequence.begin_turn(tail, talk.sequence.sampling)

    def _end(self, talk: TrackedSequence, finish: FinishReason) -> None:
        assert talk.sequence.finish is finish
        assert talk.sequence.slot == -1
        del self.active[talk.sequence.id]


class LaggingSchedulerMachine(SchedulerMachine):
    lag = 1


MANY = settings(max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


class TestScheduler(SchedulerMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = MANY


class TestLaggingScheduler(LaggingSchedulerMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = MANY


def scheduler(blocks: int = 20, slots: int = 4, budget: int = 64) -> Scheduler:
    return Scheduler(BlockPool(blocks, SIZE), slots=slots, token_budget=budget, stop_id=-1, max_tokens=MAX_LENGTH)


def sequence(id: int, tokens: int, frames: int = 8) -> Sequence:
    return Sequence.start(id, np.full((tokens, 2), 10 + id, np.int32), SamplingParams(max_frames=frames), MAX_LENGTH)


def drew(device: CheckingDevice, steps: int = 1) -> list[int]:
    """Return the ids of the sequences that sampled a frame in the next steps, in order."""
    return [progress.sequence.id for _ in range(steps) for progress in device.step()]


def test_a_sequence_that_can_never_fit_is_refused_by_add() -> None:
    line = scheduler(blocks=3)
    with pytest.raises(InvalidRequest, match="KV cache of 12"):
        line.add(sequence(0, tokens=5, frames=8))
    assert line.active == 0


def test_a_sequence_that_just_fits_runs_to_its_end() -> None:
    line = scheduler(blocks=3)
    line.add(sequence(0, tokens=5, frames=7))
    assert drew(CheckingDevice(line), steps=7) == [0] * 7


def test_a_long_prefill_does_not_stall_decoding_sequences() -> None:
    line = scheduler(budget=4)
    device = CheckingDevice(line)
    line.add(sequence(0, tokens=3, frames=20))
    assert drew(device) == [0]
    line.add(sequence(1, tokens=20))
    assert drew(device, steps=4) == [0] * 4
    assert drew(device) == [1, 0]


def test_a_prompt_is_prefilled_beside_more_decodes_than_the_token_budget() -> None:
    line = scheduler(budget=1)
    device = CheckingDevice(line)
    for id in range(3):
        line.add(sequence(id, tokens=1, frames=30))
    drew(device, steps=3)
    line.add(sequence(3, tokens=13))
    # Two tokens per decoding sequence and step.
    assert drew(device, steps=2) == [0, 1, 2] * 2
    assert drew(device) == [3, 0, 1, 2]


def test_a_larger_token_budget_computes_more_prompt_tokens_beside_many_decodes() -> None:
    assert prefill_budget(512, 100) == 512
    assert prefill_budget(512, 500) == 1000
    assert prefill_budget(2048, 256) == 2048
    assert prefill_budget(2048, 512) == 4096


def test_the_last_request_of_a_burst_starts_as_soon_as_its_prompt_is_due() -> None:
    line = scheduler(blocks=64 * 8, slots=64, budget=64)
    device = CheckingDevice(line)
    for id in range(64):
        line.add(sequence(id, tokens=8, frames=30))
    # 64 tokens a step at least, however many sequences decode already.
    assert set(drew(device, steps=8)) == set(range(64))


def test_the_latest_sequence_is_preempted_when_blocks_run_out_and_resumes_first() -> None:
    line = scheduler(blocks=7)
    device = CheckingDevice(line)
    for id in range(3):
        line.add(sequence(id, tokens=6))
    while not line.stats.preempted:
        device.step()
    line.add(sequence(3, tokens=2))
    assert [each.id for each in line.running] == [0, 1]
    assert [each.id for each in line.waiting] == [2, 3]


def test_waiting_for_memory_does_not_change_the_statistics() -> None:
    line = scheduler(blocks=5)
    device = CheckingDevice(line)
    line.add(sequence(0, tokens=8, frames=8))
    drew(device, steps=3)
    line.add(Sequence.start(1, np.full((17, 2), 10, np.int32), SamplingParams(max_frames=1), MAX_LENGTH))
    drew(device, steps=4)
    assert [each.id for each in line.waiting] == [1]
    assert line.pool.stats.hits == 0
    line.cancel(line.running[0])
    drew(device)
    assert line.pool.stats.hits == 1


def test_a_cancelled_sequence_releases_its_blocks_at_once() -> None:
    line = scheduler()
    line.add(sequence(0, tokens=9))
    CheckingDevice(line).step()
    assert line.pool.used == 3
    line.cancel(line.running[0])
    assert (line.pool.used, line.active, line.stats.cancelled) == (0, 0, 1)


def test_a_cancelled_sequence_that_waits_leaves_the_queue() -> None:
    line = scheduler()
    line.add(sequence(0, tokens=9))
    line.cancel(line.waiting.first)
    assert (line.active, line.stats.cancelled) == (0, 1)
    assert not line.plan()


def test_waiting_sequences_start_round_robin_over_their_clients() -> None:
    line = scheduler()
    clients = {0: "greedy", 1: "greedy", 2: "greedy", 3: "modest", 4: "greedy", 5: "other", 6: "modest"}
    for id, client in clients.items():
        line.add(replace(sequence(id, tokens=2), client=client))
    line.cancel(next(each for each in line.waiting if each.id == 1))
    started = [line.waiting.pop().id for _ in range(3)]
    line.waiting.add_preempted(sequence(9, tokens=2))
    started += [line.waiting.pop().id for _ in range(len(line.waiting))]
    assert started == [0, 3, 5, 9, 2, 6, 4]
    assert not line.waiting


def test_a_cached_prompt_is_not_recomputed() -> None:
    line = scheduler()
    line.add(sequence(0, tokens=12))
    CheckingDevice(line).step()
    line.add(Sequence.start(1, np.full((12, 2), 10, np.int32), SamplingParams(max_frames=2), MAX_LENGTH))
    [prefill] = line.plan().prefills
    # All but the block of the last token, from which the first frame is sampled.
    assert (prefill.start, prefill.end) == (8, 12)


@pytest.mark.parametrize("steps", range(1, 17))
def test_blocks_that_a_failed_step_should_have_computed_are_not_in_the_prefix_cache(steps: int) -> None:
    line = scheduler(budget=8)
    device = CheckingDevice(line, lag=1)
    prompt = np.arange(40, dtype=np.int32).reshape(20, 2)
    line.add(Sequence.start(0, prompt, SamplingParams(max_frames=20), MAX_LENGTH))
    drew(device, steps)  # in flight: a part of the prompt, or a frame
    [lost] = device.fail()
    [failed] = lost.sequences()
    line.requeue(failed)
    [prefill] = line.plan().prefills
    device._past(failed.slot, prefill.start)  # raises if a token was never computed
    assert prefill.start % SIZE == 0


def pausing(budget: int = 8) -> Scheduler:
    """Return a scheduler whose frames wait for steps of up to 16 prompt tokens."""
    pool = BlockPool(60, SIZE)
    return Scheduler(pool, slots=8, token_budget=budget, stop_id=-1, max_tokens=MAX_LENGTH, burst_tokens=16)


def planned_steps(
    line: Scheduler, device: CheckingDevice, steps: int
) -> list[tuple[list[tuple[int, int, int]], list[int]]]:
    """Run steps; return the spans of prompts and the ids of the sequences that sample a frame, of each."""
    planned = []
    for _ in range(steps):
        batch = line.plan()
        planned.append((spans(batch), [each.id for each, _ in batch.sampled()]))
        device.launch(batch)
        line.commit(device.collect())
    return planned


def test_frames_wait_for_the_prompts_of_a_burst_at_every_other_step() -> None:
    line = pausing()
    device = CheckingDevice(line)
    line.add(sequence(0, tokens=5, frames=30))
    drew(device, steps=2)
    for id in range(1, 5):
        line.add(sequence(id, tokens=9, frames=30))
    assert planned_steps(line, device, 5) == [
        ([(1, 0, 8), (2, 0, 8)], []),  # 32 tokens wait, the last ones of the prompts not counted
        ([(1, 8, 9), (2, 8, 9), (3, 0, 6)], [1, 2, 0]),  # a step with frames computes 8
        ([(3, 6, 8), (4, 0, 8)], []),
        ([(3, 8, 9), (4, 8, 9)], [3, 4, 0, 1, 2]),  # the rest fits into a step
        ([], [0, 1, 2, 3, 4]),
    ]


def test_a_step_after_a_prefill_only_one_keeps_to_the_token_budget_beside_many_decodes() -> None:
    line = pausing(budget=1)
    device = CheckingDevice(line)
    for id in range(3):
        line.add(sequence(id, tokens=1, frames=30))
    drew(device, steps=3)
    line.add(sequence(3, tokens=40))
    assert planned_steps(line, device, 2) == [([(3, 0, 16)], []), ([(3, 16, 17)], [0, 1, 2])]


def test_prompts_that_a_step_can_compute_delay_no_frame() -> None:
    line = pausing()
    device = CheckingDevice(line)
    line.add(sequence(0, tokens=5, frames=30))
    drew(device, steps=2)
    line.add(sequence(1, tokens=8))
    assert drew(device) == [1, 0]


def test_a_sequence_that_shares_blocks_in_flight_is_in_the_batch_although_its_frame_waits() -> None:
    line = pausing(budget=16)
    device = CheckingDevice(line, lag=1)
    for id in range(3):
        line.add(Sequence.start(id, VOICES[1], SamplingParams(max_frames=4), MAX_LENGTH))
    line.add(sequence(3, tokens=20))
    batch = line.plan()
    # Nine tokens: with both blocks of the first sequence the others would have nothing to compute before their frames.
    assert spans(batch) == [(0, 0, 8), (1, 4, 8), (2, 4, 8)]
    device.launch(batch)
    for each in reversed([each for lost in device.fail() for each in lost.sequences()]):
        line.requeue(each)
    assert {each for _ in range(6) for each in drew(device)} == {0, 1, 2, 3}


def same_voice(id: int, own: int, frames: int = 8) -> Sequence:
    """Return a sequence with a voice of 14 tokens and the first `own` of four further tokens."""
    prompt = np.concatenate((VOICES[2], OWN[:own]))
    return Sequence.start(id, prompt, SamplingParams(seed=id, max_frames=frames), MAX_LENGTH)


def spans(batch: Batch) -> list[tuple[int, int, int]]:
    return [(each.sequence.id, each.start, each.end) for each in batch.prefills]


@pytest.mark.parametrize("lag", [0, 1])
def test_requests_of_one_step_compute_their_common_prefix_once(lag: int) -> None:
    line = scheduler(blocks=40)
    device = CheckingDevice(line, lag)
    for id in range(4):
        line.add(same_voice(id, own=1 + id % 2))
    batch = line.plan()
    # Three full blocks of the voice are shared; the block of tokens 12 to 15 has the last token of each prompt.
    assert spans(batch) == [(0, 0, 15), (1, 12, 16), (2, 12, 15), (3, 12, 16)]
    assert line.pool.used == 3 + (1 + 2 + 1 + 2)  # with a block for the first frame
    assert (line.pool.stats.hits, line.pool.stats.tokens_saved) == (3, 36)
    device.launch(batch)
    while line.active:
        for progress in device.step():
            if progress.sequence.finish is not None:
                line.release(progress.sequence)
    assert line.pool.used == 0


def test_a_prefix_in_flight_is_not_computed_again_by_the_next_step() -> None:
    line = scheduler(budget=8)
    device = CheckingDevice(line, lag=1)
    line.add(same_voice(0, own=1))
    device.step()
    line.add(same_voice(1, own=2))
    batch = line.plan()
    assert spans(batch) == [(0, 8, 15), (1, 12, 13)]
    device.launch(batch)


def test_the_last_token_of_a_prompt_is_not_shared_before_its_step_has_ended() -> None:
    line = scheduler()
    device = CheckingDevice(line)
    line.add(same_voice(0, own=2))
    line.add(same_voice(1, own=4))
    batch = line.plan()
    # The fourth block of sequence 0 ends with its last token, which is computed with the frames.
    assert spans(batch) == [(0, 0, 16), (1, 12, 18)]
    device.launch(batch)


def test_without_a_prefix_cache_every_prompt_is_computed() -> None:
    line = Scheduler(BlockPool(20, SIZE, caching=False), slots=4, token_budget=64, stop_id=-1, max_tokens=MAX_LENGTH)
    for id in range(2):
        line.add(same_voice(id, own=1))
    assert spans(line.plan()) == [(0, 0, 15), (1, 0, 15)]


def test_a_cancelled_sequence_leaves_the_blocks_in_flight_to_those_that_share_them() -> None:
    line = scheduler()
    device = CheckingDevice(line, lag=1)
    first, second = same_voice(0, own=1), same_voice(1, own=2)
    line.add(first)
    line.add(second)
    device.step()
    line.cancel(first)
    line.add(same_voice(2, own=3))
    batch = line.plan()
    assert spans(batch) == [(2, 0, 17)]  # the blocks of a cancelled sequence are not looked up any more
    device.launch(batch)
    assert set(drew(device, steps=4)) == {1, 2}


def test_sequences_that_share_blocks_of_one_preempted_in_the_same_plan_are_preempted() -> None:
    class Preempting(Scheduler):
        def _plan_prefills(self, eligible: list[Sequence], budget: int, *, sampling: bool) -> list[Prefill]:
            prefills = super()._plan_prefills(eligible, budget, sampling=sampling)
            if not self.stats.preempted:
                self._preempt(eligible[0])
            return prefills

    line = Preempting(BlockPool(40, SIZE), slots=4, token_budget=64, stop_id=-1, max_tokens=MAX_LENGTH)
    device = CheckingDevice(line)
    for id in range(3):
        line.add(same_voice(id, own=2 + id % 2))
    line.add(sequence(3, tokens=9))
    batch = line.plan()
    assert spans(batch) == [(3, 0, 9)]
    assert line.stats.preempted == 3
    device.launch(batch)
    line.commit(device.collect())
    assert set(drew(device)) == {0, 1, 2, 3}


@pytest.mark.parametrize("lag", [0, 1])
def test_no_frame_is_planned_beyond_the_last(lag: int) -> None:
    line = scheduler()
    device = CheckingDevice(line, lag)
    line.add(sequence(0, tokens=5, frames=3))
    ends: list[Progress] = []
    drawn = 0
    while not ends:
        batch = line.plan()
        drawn += len(batch.sampled())
        device.launch(batch)
        landed = device.finished()
        ends = [each for each in (line.commit(landed) if landed else []) if each.sequence.finish is not None]
    assert drawn == 3
