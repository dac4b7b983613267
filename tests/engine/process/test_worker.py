"""A real engine process whose codec blocks at a gate: queueing, cancellation and draining."""

import asyncio
import multiprocessing
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config import EngineConfig
from shoal.engine.process.supervisor import Supervisor
from shoal.errors import DeadlineExceeded, EngineStopped
from shoal.speech import AudioChunk, Recording, Sampling, SpeechRequest
from tests.engine.process.test_supervisor import collect, short
from tests.engine.rigged import Gate, RiggedSource
from tests.engine.test_engine import recording

SECONDS = 240.0  # timeout for anything that would otherwise hang
MANY = 12  # more than the worker has threads


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@contextmanager
def gated(gate: Gate, tmp_path: Path) -> Iterator[Supervisor]:
    config = EngineConfig(slots=4)
    source = RiggedSource("random:tiny", device="cpu", config=config, voices=tmp_path / "voices", rig=gate.rig)
    supervisor = Supervisor(source)
    supervisor.start()
    yield supervisor
    gate.open()
    supervisor.close()


@pytest.fixture
def supervisor(gate: Gate, tmp_path: Path, forked_engines: None) -> Iterator[Supervisor]:
    with gated(gate, tmp_path) as supervisor:
        yield supervisor


@pytest.fixture
def spawned(gate: Gate, tmp_path: Path) -> Iterator[Supervisor]:
    """Spawned process, for its exit code: that of a forked one is not reliable when several threads wait for it."""
    with gated(gate, tmp_path) as supervisor:
        yield supervisor


def engine_of(supervisor: Supervisor) -> BaseProcess:
    return next(child for child in multiprocessing.active_children() if child.pid == supervisor.process_id)


def in_voice(number: int) -> SpeechRequest:
    voice = Recording(recording(pitch=200.0 + number), "one two three")
    return SpeechRequest("hello there", recordings=(voice,), sampling=Sampling(seed=1, max_frames=6))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not true():
            await asyncio.sleep(0.01)


async def cancel_all(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def commands_received(supervisor: Supervisor) -> None:
    """Wait until the engine has received all earlier commands: it handles them in order."""
    await asyncio.to_thread(supervisor.statistics)


def speaking(supervisor: Supervisor, number: int) -> "asyncio.Task[list[AudioChunk]]":
    async def spoken() -> list[AudioChunk]:
        async with aclosing(supervisor.speak(in_voice(number))) as chunks:
            return [chunk async for chunk in chunks]

    return asyncio.create_task(spoken())


def test_voices_of_cancelled_requests_are_not_encoded(supervisor: Supervisor, gate: Gate) -> None:
    async def cancel_early() -> None:
        first = speaking(supervisor, 0)
        await until(lambda: gate.seen == 1)
        cancelled = [speaking(supervisor, number) for number in range(1, MANY)]
        await commands_received(supervisor)
        await cancel_all(*cancelled)
        last = speaking(supervisor, MANY)
        await commands_received(supervisor)
        gate.open()
        async with asyncio.timeout(SECONDS):
            assert (await first)[-1].finish is not None
            assert (await last)[-1].finish is not None

    asyncio.run(cancel_early())
    assert gate.seen == 2


def test_requests_without_encoding_do_not_wait_for_it(supervisor: Supervisor, gate: Gate) -> None:
    async def overtake() -> None:
        waiting = [speaking(supervisor, number) for number in range(MANY)]
        waiting += [asyncio.create_task(supervisor.aencode(recording())) for _ in range(MANY)]
        await until(lambda: gate.seen == 2)  # a voice and a recording
        async with asyncio.timeout(SECONDS):
            assert (await collect(supervisor, short(1)))[-1].finish is not None
        assert not any(task.done() for task in waiting)
        await cancel_all(*waiting)

    asyncio.run(overtake())


CODES = np.zeros((10, 3), np.int32)
ASK: list[Callable[[Supervisor], Coroutine[Any, Any, np.ndarray]]] = [
    lambda supervisor: supervisor.aencode(recording()),
    lambda supervisor: supervisor.adecode(CODES),
]


@pytest.mark.parametrize("ask", ASK, ids=["encode", "decode"])
def test_cancelled_codec_calls_are_not_started(
    supervisor: Supervisor, gate: Gate, ask: Callable[[Supervisor], Coroutine[Any, Any, np.ndarray]]
) -> None:
    async def cancel_early() -> np.ndarray:
        first = asyncio.create_task(ask(supervisor))
        await until(lambda: gate.seen == 1)
        cancelled = [asyncio.create_task(ask(supervisor)) for _ in range(MANY)]
        await commands_received(supervisor)
        await cancel_all(first, *cancelled)
        last = asyncio.create_task(ask(supervisor))
        await commands_received(supervisor)
        gate.open()
        async with asyncio.timeout(SECONDS):
            return await last

    assert asyncio.run(cancel_early()).size
    assert gate.seen == 2


def test_a_drain_ends_at_its_timeout(spawned: Supervisor, gate: Gate) -> None:
    engine = engine_of(spawned)

    async def drain() -> list[AudioChunk | BaseException]:
        waiting = [speaking(spawned, number) for number in range(2)]
        await until(lambda: gate.seen == 1)
        await asyncio.to_thread(spawned.close, drain=True, timeout=0.5)
        return await asyncio.gather(*waiting, return_exceptions=True)

    answers = asyncio.run(drain())
    assert all(isinstance(answer, EngineStopped) and "closed" in str(answer) for answer in answers)
    assert engine.exitcode == 0  # it exited by itself and was not killed


def test_a_drain_does_not_wait_for_cancelled_requests(spawned: Supervisor, gate: Gate) -> None:
    engine = engine_of(spawned)

    async def leave_behind() -> None:
        left = speaking(spawned, 0)
        await until(lambda: gate.seen == 1)
        await cancel_all(left)

    asyncio.run(leave_behind())
    spawned.close(drain=True, timeout=3600.0)  # the encoding in progress never ends
    assert engine.exitcode == 0


def test_the_deadline_of_a_request_includes_encoding_its_voice(supervisor: Supervisor) -> None:
    with pytest.raises(DeadlineExceeded):  # the gate stays shut, so the encoding never ends
        asyncio.run(collect(supervisor, replace(in_voice(0), timeout=0.2)))
