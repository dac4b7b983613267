"""EngineThread: every caller gets an end or an error, whatever happens to other callers or the engine."""

import asyncio
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import current_thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.preprocess import build_turns
from shoal.engine.scheduling.scheduler import Batch, StepOutput
from shoal.engine.thread import EngineThread
from shoal.engine.utterance import Event, Utterance
from shoal.errors import DeadlineExceeded, EngineBusy, EngineStopped, TextError
from shoal.speech import AudioChunk, FinishReason, Samples, SamplingParams
from tests.engine.oracle import Oracle, assert_nothing_leaked, run_with_lag
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(240)
PLAIN = EngineConfig(slots=2, max_waiting=2, guard=False)
LONG = 400  # frames: longer than any of these tests waits


class Gate:
    """Lets the device run one step at a time, freely, or fail."""

    def __init__(self, core: EngineCore) -> None:
        self._launch = core.runner.launch
        self._steps = threading.Semaphore(0)
        self.open = False
        self.error: BaseException | None = None
        core.runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, batch: Batch) -> Callable[[], StepOutput]:
        while not self.open and self.error is None and not self._steps.acquire(timeout=0.01):
            pass
        if self.error is not None:
            raise self.error
        return self._launch(batch)

    def step(self, times: int = 1) -> None:
        self._steps.release(times)


class ThreadHarness:
    """An engine thread, a gate for its steps, and utterances for it."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig = PLAIN) -> None:
        self.core = EngineCore(checkpoint, config)
        self.gate = Gate(self.core)
        self.thread = EngineThread(self.core)
        self.turns = build_turns("hello", None, checkpoint)
        self._ids = iter(range(1000))

    def utterance(self, frames: int = 6, seed: int = 1, deadline: float | None = None) -> Utterance:
        return Utterance(next(self._ids), self.turns, SamplingParams(seed=seed, max_frames=frames), deadline=deadline)

    def settle(self) -> None:
        """Wait until no utterance is active."""
        wait_until(lambda: self.thread.active == 0)
        wait_until(lambda: self.core.idle)

    def close(self) -> None:
        self.gate.open = True
        self.thread.close()


def samples(chunks: list[AudioChunk]) -> Samples:
    return np.concatenate([chunk.samples for chunk in chunks])


def test_the_gpu_of_the_model_is_the_current_device_of_every_thread_that_runs_steps(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current device belongs to a thread and is the first GPU by default, also with `--device cuda:1`."""
    core, second = EngineCore(tiny, PLAIN), torch.device("cuda", 1)
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((current_thread().name, device)))
    monkeypatch.setattr(core, "checkpoint", SimpleNamespace(model=SimpleNamespace(device=second)))
    EngineThread(core).close()
    assert chosen == [("shoal-engine", second)]
    monkeypatch.setattr(EngineCore, "use_device", lambda core: chosen.append((current_thread().name, second)))
    EngineCore(tiny, PLAIN)
    assert chosen[1:] == [(current_thread().name, second)]


@pytest.fixture
def harness(tiny: Checkpoint) -> Iterator[ThreadHarness]:
    made = ThreadHarness(tiny)
    yield made
    made.close()
    assert not made.thread._thread.is_alive()


@pytest.fixture
def open_harness(harness: ThreadHarness) -> ThreadHarness:
    harness.gate.open = True
    return harness


def test_chunks_are_in_order_and_the_last_has_the_finish_reason(open_harness: ThreadHarness, oracle: Oracle) -> None:
    chunks = list(open_harness.thread.speak(open_harness.utterance()))
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.LENGTH]
    expected_output = oracle.speak(open_harness.turns, SamplingParams(seed=1, max_frames=6))
    assert np.allclose(samples(chunks), expected_output.samples, atol=1e-5)


def test_many_threads_are_served_at_once(tiny: Checkpoint, oracle: Oracle) -> None:
    harness = ThreadHarness(tiny, replace(PLAIN, slots=4, max_waiting=100))
    harness.gate.open = True
    received: dict[int, list[AudioChunk]] = {}

    def listen(seed: int) -> None:
        received[seed] = list(harness.thread.speak(harness.utterance(seed=seed)))

    threads = [threading.Thread(target=listen, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    harness.close()
    for seed in range(12):
        expected_output = oracle.speak(harness.turns, SamplingParams(seed=seed, max_frames=6))
        assert np.allclose(samples(received[seed]), expected_output.samples, atol=1e-5)
    assert_nothing_leaked(harness.core)


def test_closing_the_chunks_cancels_within_a_step(harness: ThreadHarness) -> None:
    chunks = harness.thread.speak(harness.utterance(LONG))
    harness.gate.step(3)
    next(chunks)
    assert len(harness.core.scheduler.running) == 1
    chunks.close()
    harness.gate.step(1)
    harness.settle()
    assert_nothing_leaked(harness.core)
    assert harness.core.scheduler.stats.cancelled == 1


def test_closing_a_generator_before_its_first_chunk_cancels(harness: ThreadHarness) -> None:
    harness.thread.speak(harness.utterance(LONG)).close()
    harness.gate.step(2)
    harness.settle()
    assert_nothing_leaked(harness.core)


def test_a_garbage_collected_generator_cancels(harness: ThreadHarness) -> None:
    harness.thread.speak(harness.utterance(LONG))
    harness.gate.step(2)
    harness.settle()
    assert_nothing_leaked(harness.core)


def test_an_invalid_utterance_is_refused_and_released(open_harness: ThreadHarness, tiny: Checkpoint) -> None:
    too_long = Utterance(900, build_turns("word " * 400, None, tiny, chunk_bytes=4000), SamplingParams())
    with pytest.raises(TextError):
        list(open_harness.thread.speak(too_long))
    assert open_harness.thread.active == 0


def test_utterances_beyond_slots_and_queue_are_refused_at_once(harness: ThreadHarness) -> None:
    taken = [harness.thread.speak(harness.utterance(2)) for _ in range(4)]
    with pytest.raises(EngineBusy, match="4 requests"):
        harness.thread.speak(harness.utterance(2))
    harness.gate.open = True
    for chunks in taken:
        assert list(chunks)[-1].finish is FinishReason.LENGTH
    assert list(harness.thread.speak(harness.utterance(2)))


def test_a_cancelled_utterance_stops_counting_during_the_current_step(harness: ThreadHarness) -> None:
    taken = [harness.thread.speak(harness.utterance(LONG)) for _ in range(4)]
    wait_until(lambda: bool(harness.core.scheduler.running))  # the gate blocks the device
    taken[0].close()
    taken.append(harness.thread.speak(harness.utterance(2)))
    with pytest.raises(EngineBusy, match="4 requests"):
        harness.thread.speak(harness.utterance(2))
    for chunks in taken[1:4]:
        chunks.close()
    harness.gate.open = True
    assert list(taken[4])[-1].finish is FinishReason.LENGTH
    harness.settle()
    assert_nothing_leaked(harness.core)


def test_a_request_past_its_deadline_gets_deadline_exceeded(harness: ThreadHarness) -> None:
    chunks = harness.thread.speak(harness.utterance(LONG, deadline=time.monotonic() + 0.05))
    harness.gate.step(1)
    time.sleep(0.06)
    harness.gate.step(1)
    with pytest.raises(DeadlineExceeded):
        list(chunks)
    harness.settle()


def test_close_fails_active_utterances_with_engine_stopped(harness: ThreadHarness) -> None:
    running = harness.thread.speak(harness.utterance(LONG))
    harness.gate.step(3)
    next(running)
    waiting = [harness.thread.speak(harness.utterance(LONG)) for _ in range(3)]
    closing = threading.Thread(target=harness.close)
    closing.start()
    for chunks in (running, *waiting):
        with pytest.raises(EngineStopped):
            list(chunks)
    closing.join(240)
    assert not closing.is_alive()
    assert harness.thread.active == 0
    assert_nothing_leaked(harness.core)


def test_close_with_drain_finishes_active_utterances(harness: ThreadHarness) -> None:
    taken = [harness.thread.speak(harness.utterance(4, seed=seed)) for seed in range(4)]
    closing = threading.Thread(target=lambda: harness.thread.close(drain=True))
    closing.start()
    wait_until(lambda: not harness.thread.running)
    with pytest.raises(EngineStopped):
        harness.thread.speak(harness.utterance())
    harness.gate.open = True
    for chunks in taken:
        assert list(chunks)[-1].finish is FinishReason.LENGTH
    closing.join(240)
    assert not closing.is_alive()


def test_an_utterance_submitted_just_before_a_drain_is_finished(tiny: Checkpoint) -> None:
    """Between two utterances the engine is idle although a command is queued."""
    for _ in range(20):
        harness = ThreadHarness(tiny)
        harness.gate.open = True
        first = harness.thread.speak(harness.utterance(1))
        assert next(first).finish is FinishReason.LENGTH
        second = harness.thread.speak(harness.utterance(1))
        harness.thread.close(drain=True)
        assert list(second)[-1].finish is FinishReason.LENGTH


def test_a_drain_past_its_timeout_fails_with_engine_stopped(harness: ThreadHarness) -> None:
    chunks = harness.thread.speak(harness.utterance(LONG))
    harness.gate.step(2)
    ticking = threading.Timer(0.3, lambda: setattr(harness.gate, "open", True))
    ticking.start()
    started = time.monotonic()
    harness.thread.close(drain=True, timeout=0.2)
    assert time.monotonic() - started < 240
    with pytest.raises(EngineStopped):
        list(chunks)
    ticking.join()


def test_close_is_idempotent(open_harness: ThreadHarness) -> None:
    open_harness.thread.close()
    open_harness.thread.close()
    open_harness.thread.close(drain=True)
    assert not open_harness.thread.running


def test_submit_after_close_is_refused(open_harness: ThreadHarness) -> None:
    open_harness.thread.close()
    with pytest.raises(EngineStopped, match="closed"):
        open_harness.thread.speak(open_harness.utterance())


def test_a_failing_engine_answers_all_callers(harness: ThreadHarness, caplog: pytest.LogCaptureFixture) -> None:
    running = [harness.thread.speak(harness.utterance(LONG)) for _ in range(2)]
    harness.gate.step(3)
    for chunks in running:
        next(chunks)
    waiting = harness.thread.speak(harness.utterance(LONG))
    harness.gate.error = MemoryError("the device is gone")
    for chunks in (*running, waiting):
        with pytest.raises(EngineStopped):
            list(chunks)
    wait_until(lambda: not harness.thread._thread.is_alive())
    assert not harness.thread.running
    assert harness.thread.active == 0
    with pytest.raises(EngineStopped) as refused:
        harness.thread.speak(harness.utterance())
    assert isinstance(refused.value.__cause__, MemoryError)
    assert "engine thread failed" in caplog.text
    harness.thread.close(drain=True)


def test_requests_racing_a_failing_engine_are_all_answered(tiny: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    for attempt in range(5):
        harness = ThreadHarness(tiny, replace(PLAIN, max_waiting=1000))
        harness.gate.open = True
        outcomes: queue.SimpleQueue[str] = queue.SimpleQueue()

        def ask(harness: ThreadHarness = harness, outcomes: "queue.SimpleQueue[str]" = outcomes) -> None:
            for _ in range(10):
                try:
                    outcomes.put(str(list(harness.thread.speak(harness.utterance(2)))[-1].finish))
                except EngineStopped:
                    outcomes.put("stopped")

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.01 * attempt)
        harness.gate.error = OSError("gone")
        for thread in threads:
            thread.join(240)
            assert not thread.is_alive()
        assert outcomes.qsize() == 40


@pytest.mark.parametrize("lag", [0, 1], ids=["between steps", "while the device computes"])
def test_a_failing_delivery_callback_cancels_its_utterance(
    harness: ThreadHarness, oracle: Oracle, caplog: pytest.LogCaptureFixture, lag: int
) -> None:
    run_with_lag(harness.core, lag)

    def broken(event: Event) -> None:
        raise ConnectionError("connection closed")

    harness.thread.submit(harness.utterance(LONG), broken)
    chunks = harness.thread.speak(harness.utterance())
    harness.gate.open = True
    expected_output = oracle.speak(harness.turns, SamplingParams(seed=1, max_frames=6))
    assert np.allclose(samples(list(chunks)), expected_output.samples, atol=1e-5)
    harness.settle()
    assert "delivery callback failed" in caplog.text
    assert_nothing_leaked(harness.core)


def test_cancelling_ended_or_unknown_utterances_has_no_effect(open_harness: ThreadHarness) -> None:
    ended = open_harness.utterance(2)
    list(open_harness.thread.speak(ended))
    open_harness.thread.cancel(ended)
    open_harness.thread.cancel(open_harness.utterance())
    assert list(open_harness.thread.speak(open_harness.utterance(2)))
    assert open_harness.thread.active == 0


def test_the_event_loop_gets_the_same_chunks(open_harness: ThreadHarness, oracle: Oracle) -> None:
    async def listen() -> list[AudioChunk]:
        return [chunk async for chunk in open_harness.thread.aspeak(open_harness.utterance())]

    expected_output = oracle.speak(open_harness.turns, SamplingParams(seed=1, max_frames=6))
    assert np.allclose(samples(asyncio.run(listen())), expected_output.samples, atol=1e-5)


def test_the_event_loop_is_never_blocked(harness: ThreadHarness) -> None:
    """The loop turns while the gate blocks the device and a client waits for a chunk."""

    async def listen() -> list[AudioChunk]:
        chunks = harness.thread.aspeak(harness.utterance(20))
        coming = asyncio.ensure_future(anext(chunks))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not coming.done()
        harness.gate.open = True
        return [await coming, *[chunk async for chunk in chunks]]

    assert asyncio.run(listen())[-1].finish is FinishReason.LENGTH


def test_an_async_generator_that_is_closed_early_cancels(harness: ThreadHarness) -> None:
    async def cancel_early() -> None:
        chunks = harness.thread.aspeak(harness.utterance(LONG))
        harness.gate.step(3)
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(cancel_early())
    harness.gate.step()
    harness.settle()
    assert_nothing_leaked(harness.core)


def test_a_task_that_is_cancelled_cancels(harness: ThreadHarness) -> None:
    async def listen() -> None:
        async for _ in harness.thread.aspeak(harness.utterance(LONG)):
            pass

    async def cancel_early() -> None:
        task = asyncio.create_task(listen())
        harness.gate.step(3)
        while not harness.core.scheduler.running:
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_early())
    harness.gate.step(2)
    harness.settle()
    assert_nothing_leaked(harness.core)


def test_a_closed_event_loop_does_not_affect_other_callers(harness: ThreadHarness) -> None:
    async def discard() -> None:
        chunks = harness.thread.aspeak(harness.utterance(LONG))
        first = asyncio.ensure_future(anext(chunks))
        while not harness.thread.active:
            await asyncio.sleep(0.002)
        first.cancel()

    asyncio.run(discard())
    chunks = harness.thread.speak(harness.utterance(3))
    harness.gate.open = True
    assert list(chunks)[-1].finish is FinishReason.LENGTH
    harness.settle()


def test_requests_that_wait_for_their_batch_to_fill_start_without_another_request(tiny: Checkpoint) -> None:
    harness = ThreadHarness(tiny, replace(PLAIN, policy="dynamic", batch_size=2, batch_seconds=0.05))
    harness.gate.open = True
    started = time.monotonic()
    assert list(harness.thread.speak(harness.utterance(2)))[-1].finish is FinishReason.LENGTH
    assert time.monotonic() - started > 0.05
    harness.close()


LEFT_OPEN = """
import shoal
from shoal.speech import Sampling

engine = shoal.load("random:tiny", device="cpu")
chunks = engine.speak("hello there", sampling=Sampling(max_frames=1500, seed=1, top_p=1.0), stream=True)
print(len(next(chunks).samples))
raise SystemExit(3)
"""


def test_a_program_that_ends_while_its_engine_speaks_keeps_its_exit_code() -> None:
    ended = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert int(ended.stdout) > 0
