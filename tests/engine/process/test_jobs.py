import asyncio
import threading

import pytest

from shoal.engine.process.jobs import JobRunner

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def jobs() -> JobRunner:
    return JobRunner(2)


def test_wait_blocks_until_all_jobs_have_ended(jobs: JobRunner) -> None:
    done: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0.02)
        done.append(1)

    for number in range(3):
        jobs.start(number, work)
    jobs.wait(None)
    assert done == [1, 1, 1]
    assert jobs.cancel_all() == []


def test_a_cancelled_job_ends_at_its_await(jobs: JobRunner) -> None:
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    jobs.start(1, work)
    assert started.wait(240)
    jobs.cancel(2)  # unknown job
    jobs.cancel(1)
    assert ended.wait(240)
    jobs.cancel(1)
    jobs.wait(None)


def test_a_job_cancelled_before_it_starts_does_not_run(jobs: JobRunner) -> None:
    """Both commands are queued before the event loop runs."""
    held, free = threading.Event(), threading.Event()
    done: list[int] = []

    async def hold() -> None:
        held.set()
        free.wait()

    async def work() -> None:
        done.append(1)

    jobs.start(1, hold)
    assert held.wait(240)
    jobs.start(2, work)
    jobs.cancel(2)
    free.set()
    jobs.wait(None)
    assert not done


def test_wait_ends_at_its_timeout_and_the_rest_can_be_cancelled(jobs: JobRunner) -> None:
    async def work() -> None:
        await asyncio.sleep(3600)

    jobs.start(7, work)
    jobs.wait(0.01)
    assert jobs.cancel_all() == [7]
    jobs.wait(None)
