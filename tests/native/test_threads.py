"""Threads of the native library: they share work, sleep when there is none, and are left out on busy cores."""

import ctypes
import threading
from itertools import pairwise

import numpy as np
import pytest

from shoal.native.library import UNIT, Context, open_library
from tests.waiting import wait_until


@pytest.fixture
def context(instruction_sets: list[str]) -> Context:
    return Context(instruction_sets[0], 2)


def sleeping(context: Context) -> tuple[int, bool]:
    """Return the workers that sleep, and whether the caller does."""
    caller = ctypes.c_int32()
    workers = context.library.shoal_sleeping(context.handle, ctypes.byref(caller))
    return workers, bool(caller.value)


def allowed(calls: list[tuple[float, float, float]]) -> list[bool]:
    """Return whether a new governor allows threads for each call of (time, seconds worked, seconds waited)."""
    times = [np.array(each, np.float64) for each in zip(*calls, strict=True)]
    out = np.empty(len(calls), np.int32)
    open_library().shoal_govern(len(calls), *(each.ctypes.data for each in (*times, out)))
    return [bool(each) for each in out]


def test_an_idle_pool_sleeps(context: Context) -> None:
    context.library.shoal_parallel(context.handle, 4, UNIT(lambda unit, thread: None))
    wait_until(lambda: sleeping(context) == (1, False))


def test_the_caller_sleeps_while_a_worker_holds_a_unit(context: Context) -> None:
    """A worker that is suspended on a busy core must not keep the caller spinning."""
    begun, gate, done = threading.Event(), threading.Event(), []

    @UNIT
    def unit(number: int, thread: int) -> None:
        if thread == 0:
            begun.wait()  # the worker takes one of the two units
        else:
            begun.set()
            gate.wait()
        done.append(number)

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


def test_every_unit_runs_once_in_many_calls(context: Context) -> None:
    counts = np.zeros(64, np.int64)

    @UNIT
    def unit(number: int, thread: int) -> None:
        counts[number] += 1

    for _ in range(200):
        context.library.shoal_parallel(context.handle, len(counts), unit)
    assert (counts == 200).all()


def test_threads_are_used_while_the_caller_does_not_wait_for_them() -> None:
    assert all(allowed([(0.01 * index, 0.01, 0.001) for index in range(50)]))


def test_waiting_for_suspended_workers_pauses_the_threads_for_longer_and_longer() -> None:
    """Two servers on the same cores, or a busy core: the fake clock advances 10 ms per call, waits are 80 % of it."""
    decisions = allowed([(0.01 * index, 0.002, 0.008) for index in range(2000)])
    assert decisions[0]
    tried = [index for index, each in enumerate(decisions) if each]
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert pauses[0] >= 10  # calls: a tenth of a second
    assert max(pauses) <= 201  # they are tried again after 2 s at the latest
    assert pauses[:4] == sorted(pauses[:4])
    assert len(tried) < 30


def test_idle_cores_end_the_pauses() -> None:
    busy = [(0.01 * index, 0.002, 0.008) for index in range(500)]
    idle = [(10 + 0.01 * index, 0.01, 0.0) for index in range(100)]
    assert all(allowed(busy + idle)[-100:])
