"""Threads of the native library: they share work, sleep when there is none, and are left out on busy cores."""

import ctypes
import threading

import numpy as np
import pytest

from shoal.native.library import UNIT, Context, open_library
from tests.waiting import TIMEOUT_SECONDS, wait_until


@pytest.fixture
def context(instruction_sets: list[str]) -> Context:
    return Context(instruction_sets[0], 2)


def sleeping(context: Context) -> tuple[int, bool]:
    """Return the workers that sleep, and whether the caller does."""
    caller = ctypes.c_int32()
    workers = context.library.shoal_sleeping(context.handle, ctypes.byref(caller))
    return workers, bool(caller.value)


def calls(count: int, *, alone: float, threaded: float, begin: float = 0.0) -> np.ndarray:
    """Return calls 2 ms apart, as rows of (time, amount of work, seconds with one thread, seconds with all)."""
    fixed = (np.full(count, each) for each in (1e6, alone, threaded))
    return np.stack([begin + 0.002 * np.arange(count), *fixed])


def allowed(given: np.ndarray) -> np.ndarray:
    """Return whether a new governor allows threads for each of the calls."""
    out = np.empty(given.shape[1], np.int32)
    rows = [np.ascontiguousarray(row, np.float64) for row in given]
    open_library().shoal_govern(len(out), *(each.ctypes.data for each in (*rows, out)))
    return out.astype(bool)


def test_an_idle_pool_sleeps(context: Context) -> None:
    for _ in range(2):  # the first call is measured alone
        context.library.shoal_parallel(context.handle, 4, UNIT(lambda unit, thread: None))
    wait_until(lambda: sleeping(context) == (1, False))


def test_the_caller_sleeps_while_a_worker_holds_a_unit(context: Context) -> None:
    """A worker that is suspended on a busy core must not keep the caller spinning."""
    begun, gate, done = threading.Event(), threading.Event(), list[int]()

    @UNIT
    def unit(number: int, thread: int) -> None:
        if thread == 0:
            begun.wait(TIMEOUT_SECONDS)  # the worker takes one of the two units
        else:
            begun.set()
            gate.wait(TIMEOUT_SECONDS)
        done.append(number)

    context.library.shoal_parallel(context.handle, 2, UNIT(lambda number, thread: None))  # measured alone
    caller = threading.Thread(target=lambda: context.library.shoal_parallel(context.handle, 2, unit))
    caller.start()
    try:
        wait_until(lambda: sleeping(context)[1])
        assert len(done) == 1
    finally:
        gate.set()
        caller.join()
    assert sorted(done) == [0, 1]
    wait_until(lambda: sleeping(context) == (1, False))


@pytest.mark.parametrize("threads", [2, 5])
def test_every_unit_runs_once_in_many_calls(instruction_sets: list[str], threads: int) -> None:
    context, counts = Context(instruction_sets[0], threads), np.zeros(16, np.int64)

    @UNIT
    def unit(number: int, thread: int) -> None:
        counts[number] += 1

    for _ in range(400):
        for units in (2, 3, 16):
            context.library.shoal_parallel(context.handle, units, unit)
    assert counts.tolist() == [1200] * 2 + [800] + [400] * 13


def test_workers_without_a_unit_stay_asleep(instruction_sets: list[str]) -> None:
    """A small product on a machine with many cores: the others do not spin."""
    context, both, threads = Context(instruction_sets[0], 6), threading.Barrier(2), set[int]()

    @UNIT
    def unit(number: int, thread: int) -> None:
        threads.add(thread)
        both.wait(TIMEOUT_SECONDS)  # so that no thread computes both units

    context.library.shoal_parallel(context.handle, 2, UNIT(lambda number, thread: None))  # measured alone
    wait_until(lambda: sleeping(context) == (5, False))
    context.library.shoal_parallel(context.handle, 2, unit)
    assert threads == {0, 1}


def test_threads_are_used_as_long_as_they_are_faster() -> None:
    """All but the first call, which is measured alone, and one of 64 after it."""
    found = allowed(calls(1000, alone=0.001, threaded=0.0006))
    assert not found[0]
    assert found.mean() > 0.98


def test_threads_that_are_not_faster_are_left_out_for_longer_and_longer() -> None:
    """As with two servers on the same cores: a worker is suspended while the caller waits for it."""
    found = allowed(calls(10_000, alone=0.001, threaded=0.001))
    tried = np.flatnonzero(found)
    pauses = np.diff(tried)[np.diff(tried) > 2] * 0.002  # seconds
    assert found.mean() < 0.05
    assert 0.1 <= pauses[0] < 0.2
    assert 1.9 < pauses[-1] < 2.1  # they are tried again
    assert list(pauses) == sorted(pauses)


def test_a_core_that_becomes_busy_and_idle_again_is_noticed() -> None:
    idle, busy = (0.001, 0.0006), (0.001, 0.003)
    parts = [
        calls(1000, alone=alone, threaded=threaded, begin=2.0 * number)
        for number, (alone, threaded) in enumerate((idle, busy, busy, busy, idle, idle, idle))
    ]
    found = allowed(np.concatenate(parts, axis=1)).reshape(7, 1000).mean(axis=1)
    assert found[0] > 0.98
    assert (found[1:4] < 0.05).all()
    assert found[6] > 0.98


def test_a_call_alone_that_was_suspended_does_not_count_in_full() -> None:
    given = calls(2000, alone=0.001, threaded=0.001)
    given[2, 500] = 1.0  # one call took a thousand times as long
    assert allowed(given)[600:].mean() < 0.1
