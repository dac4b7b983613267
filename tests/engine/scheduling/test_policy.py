import numpy as np
import pytest

from shoal.engine.scheduling.blocks import BlockPool
from shoal.engine.scheduling.policy import AdmissionPolicy, Continuous, Dynamic, Static, admission_policy
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.sequence import Sequence
from shoal.errors import InvalidRequest
from shoal.speech import SamplingParams
from tests.engine.clock import FakeClock
from tests.engine.device import CheckingDevice


class PolicyHarness:
    """A scheduler with a policy and a fake clock; sequences run for the requested number of frames."""

    def __init__(self, policy: AdmissionPolicy, slots: int = 8) -> None:
        self.clock = FakeClock()
        pool = BlockPool(400, 4)
        self.scheduler = Scheduler(
            pool, slots=slots, token_budget=64, stop_id=-1, max_tokens=64, policy=policy, clock=self.clock
        )
        self.device = CheckingDevice(self.scheduler)
        self._ids = 0

    def arrive(self, count: int = 1, frames: int = 3) -> None:
        for _ in range(count):
            prompt = np.full((3, 2), self._ids, np.int32)
            self.scheduler.add(Sequence.start(self._ids, prompt, SamplingParams(max_frames=frames), 64))
            self._ids += 1

    def step(self, seconds: float = 0.01) -> int:
        """Run one step of the given duration and return the number of sequences in it."""
        batch = self.scheduler.plan()
        self.device.launch(batch)
        self.clock.now += seconds
        drawn = self.device.finished()
        assert drawn is not None
        for progress in self.scheduler.commit(drawn):
            if progress.sequence.finish is not None:
                self.scheduler.release(progress.sequence)
        return len(batch.sequences())


def test_continuous_admits_all_sequences_at_the_next_step() -> None:
    harness = PolicyHarness(Continuous())
    harness.arrive(2)
    assert harness.step() == 2
    harness.arrive(3)
    assert harness.step() == 5


def test_continuous_is_bounded_by_the_slots() -> None:
    harness = PolicyHarness(Continuous(), slots=3)
    harness.arrive(5, frames=2)
    assert [harness.step(), harness.step(), harness.step()] == [3, 3, 2]


def test_dynamic_waits_for_a_full_batch() -> None:
    harness = PolicyHarness(Dynamic(size=3, seconds=1.0))
    harness.arrive(2)
    assert harness.step() == 0
    harness.arrive(1)
    assert harness.step() == 3


def test_dynamic_starts_a_partial_batch_after_its_waiting_time() -> None:
    harness = PolicyHarness(Dynamic(size=4, seconds=0.05))
    harness.arrive(1)
    assert harness.step(0.03) == 0
    harness.arrive(1)
    assert harness.step(0.03) == 0
    assert harness.step() == 2


def test_dynamic_runs_a_batch_to_its_end_before_the_next() -> None:
    harness = PolicyHarness(Dynamic(size=2, seconds=0.05))
    harness.arrive(5, frames=3)
    assert [harness.step() for _ in range(6)] == [2, 2, 2, 2, 2, 2]
    # The fifth sequence is past its waiting time.
    assert harness.step() == 1


def test_static_starts_the_waiting_sequences_and_admits_no_other() -> None:
    harness = PolicyHarness(Static(size=4))
    harness.arrive(1, frames=3)
    assert harness.step() == 1
    harness.arrive(6, frames=2)
    assert [harness.step(), harness.step()] == [1, 1]
    assert [harness.step() for _ in range(4)] == [4, 4, 2, 2]


@pytest.mark.parametrize("policy", [Dynamic(size=2, seconds=0.0), Static(size=2)])
def test_preempted_sequences_are_not_subject_to_the_policy(policy: AdmissionPolicy) -> None:
    harness = PolicyHarness(policy)
    harness.arrive(2, frames=4)
    harness.step()
    harness.scheduler.requeue(harness.scheduler.running[-1])
    assert harness.step() == 2


@pytest.mark.parametrize("policy", [Continuous(), Dynamic(size=3, seconds=0.05), Static(size=3)])
def test_every_policy_serves_sequences_in_order_of_arrival(policy: AdmissionPolicy) -> None:
    harness = PolicyHarness(policy, slots=4)
    harness.arrive(10)
    seen: list[int] = []
    for _ in range(200):
        harness.step()
        seen += [each.id for each in harness.scheduler.running if each.id not in seen]
    assert harness.scheduler.active == 0
    assert seen == sorted(seen)


def test_policies_are_chosen_by_name() -> None:
    assert admission_policy("continuous", 4, 0.05) == Continuous()
    assert admission_policy("dynamic", 8, 0.2) == Dynamic(8, 0.2)
    assert admission_policy("static", 8, 0.2) == Static(8)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="continuous, dynamic or static"):
        admission_policy("greedy", 4, 0.05)  # type: ignore[arg-type]
