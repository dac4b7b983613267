import numpy as np
import pytest

from shoal.engine.memory.concurrency_limit import COOLDOWN_SECONDS, MAX_COOLDOWN_SECONDS, ConcurrencyLimit
from shoal.engine.scheduling.blocks import BlockPool
from shoal.engine.scheduling.scheduler import Scheduler, StepOutput
from shoal.engine.scheduling.sequence import Sequence
from shoal.speech import SamplingParams


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_limit_shrinks_to_three_quarters_and_grows_by_one(clock: Clock) -> None:
    limit = ConcurrencyLimit(8, clock)
    assert limit.shrink(running=8)
    assert limit.limit == 6
    for expected in (6, 6, 7, 7, 8, 8, 8):
        limit.maybe_grow()
        assert limit.limit == expected
        clock.now += COOLDOWN_SECONDS / 2 + 0.1


def test_the_cooldown_doubles_whenever_growing_failed(clock: Clock) -> None:
    limit, cooldown = ConcurrencyLimit(4, clock), COOLDOWN_SECONDS
    limit.shrink(running=4)
    for _ in range(10):
        clock.now += cooldown - 0.1
        limit.maybe_grow()
        assert limit.limit == 3
        clock.now += 0.2
        limit.maybe_grow()
        assert limit.limit == 4
        limit.shrink(running=4)
        cooldown = min(2 * cooldown, MAX_COOLDOWN_SECONDS)
    assert cooldown == MAX_COOLDOWN_SECONDS
    limit.shrink(running=3)  # an error without growth resets the cooldown
    clock.now += COOLDOWN_SECONDS
    limit.maybe_grow()
    assert limit.limit == 3


def test_the_limit_stays_between_one_and_the_slots(clock: Clock) -> None:
    limit = ConcurrencyLimit(2, clock)
    assert not limit.shrink(running=1)
    assert limit.limit == 1
    for _ in range(5):
        clock.now += MAX_COOLDOWN_SECONDS
        limit.maybe_grow()
    assert limit.limit == 2


def test_a_scheduler_raises_the_limit_when_a_sequence_waits(clock: Clock) -> None:
    scheduler = Scheduler(BlockPool(64, 16), slots=4, token_budget=64, stop_id=-1, max_tokens=60, clock=clock)
    for id in range(4):
        scheduler.add(Sequence.start(id, np.zeros((5, 3), np.int32), SamplingParams(max_frames=50), 60))
    scheduler.concurrency.shrink(running=3)

    def running() -> int:
        batch = scheduler.plan()
        scheduler.commit(StepOutput(batch, np.zeros((len(batch.sampled()), 3), np.int32)))
        return len(scheduler.running)

    assert [running(), running()] == [2, 2]
    clock.now += COOLDOWN_SECONDS
    assert running() == 3
    clock.now += COOLDOWN_SECONDS / 2
    assert running() == 3
