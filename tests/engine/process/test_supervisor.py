"""A real engine process under the supervisor: killed, restarted, reloaded, closed."""

import asyncio
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shoal.checkpoint.random import random_checkpoint
from shoal.checkpoint.save import save_random
from shoal.config import EngineConfig
from shoal.engine.process.engine_process import EngineProcess
from shoal.engine.process.jobs import JobRunner
from shoal.engine.process.messages import (
    Backends,
    Encode,
    Failed,
    Fragment,
    GetStats,
    Heartbeat,
    ReleaseMemory,
    Result,
    Speak,
)
from shoal.engine.process.replies import ReplyStream
from shoal.engine.process.supervisor import Supervisor, SupervisorConfig
from shoal.engine.process.worker import MAX_QUEUED_BYTES, EngineSource, EngineWorker, ReplyChannel
from shoal.errors import (
    EngineBusy,
    EngineStopped,
    GenerationFailed,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    ShoalError,
    TextError,
)
from shoal.speech import AudioChunk, FinishReason, Recording, Sampling, SpeechRequest
from tests.engine.process.conftest import forking
from tests.engine.rigged import POISON_SEED, RiggedSource, break_batches, break_the_device, break_the_thread
from tests.engine.test_engine import recording
from tests.waiting import wait_until

SOURCE = EngineSource("random:tiny", device="cpu", config=EngineConfig(slots=4))
ENDLESS = Sampling(max_frames=1500, seed=1, temperature=1.0, top_p=1.0)


def short(seed: int, frames: int = 6) -> SpeechRequest:
    return SpeechRequest("hello there", sampling=Sampling(seed=seed, max_frames=frames))


async def collect(supervisor: Supervisor, request: SpeechRequest) -> list[AudioChunk]:
    return [chunk async for chunk in supervisor.speak(request)]


def samples_of(chunks: list[AudioChunk]) -> np.ndarray:
    return np.concatenate([chunk.samples for chunk in chunks])


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    source = EngineSource(
        "random:tiny",
        device="cpu",
        config=EngineConfig(slots=4, backend="eager"),  # slow enough to be killed before a long speech ends
        voices=tmp_path_factory.mktemp("v"),
    )
    supervisor = Supervisor(source)
    with forking():
        supervisor.start()
    yield supervisor
    supervisor.close()


def test_requests_with_one_seed_give_the_same_audio(supervisor: Supervisor) -> None:
    async def twice() -> list[list[AudioChunk]]:
        return await asyncio.gather(*(collect(supervisor, short(seed)) for seed in (1, 2, 1)))

    first, second, again = asyncio.run(twice())
    assert first[-1].finish is FinishReason.LENGTH
    assert len(samples_of(first)) == 6 * 640
    np.testing.assert_allclose(samples_of(first), samples_of(again), atol=1e-5)
    assert np.abs(samples_of(first) - samples_of(second)).max() > 1e-3


def test_errors_keep_their_class_across_the_process_boundary(supervisor: Supervisor) -> None:
    with pytest.raises(TextError, match="empty"):
        asyncio.run(collect(supervisor, SpeechRequest("   ")))
    with pytest.raises(InvalidRequest):
        asyncio.run(collect(supervisor, SpeechRequest("hi", recordings=(Recording(b"noise", "words"),))))


def test_recordings_are_encoded_and_codes_decoded(supervisor: Supervisor) -> None:
    codes = np.zeros((10, 3), np.int32)
    assert asyncio.run(supervisor.adecode(codes)).shape == (3 * 640,)
    assert asyncio.run(supervisor.aencode(recording(seconds=1.0))).shape == (10, 25)
    assert supervisor.statistics()["slots"] == 4
    assert asyncio.run(supervisor.release_memory()).keys() >= {"prefix_blocks", "device_bytes", "host_bytes"}
    assert supervisor.sample_rate == 16000


def test_closing_the_stream_frees_the_slot(supervisor: Supervisor) -> None:
    async def close_early() -> None:
        chunks = supervisor.speak(SpeechRequest("a long one", sampling=ENDLESS))
        await anext(chunks)
        await chunks.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)

    asyncio.run(close_early())
    wait_until(lambda: supervisor.statistics()["running"] == 0)


def test_a_request_is_submitted_before_its_first_chunk_is_awaited() -> None:
    supervisor = Supervisor(SOURCE)  # not started, so its jobs stay in its queue

    async def close_without_waiting() -> None:
        chunks = supervisor.speak(short(1))
        assert len(supervisor._queued) == 1
        await chunks.aclose()

    asyncio.run(close_without_waiting())
    assert supervisor._queued == []


@pytest.mark.usefixtures("forked_engines")
def test_a_killed_engine_restarts_and_requests_without_audio_are_resubmitted(supervisor: Supervisor) -> None:
    async def kill_under_load() -> tuple[list[AudioChunk | BaseException], list[list[AudioChunk]]]:
        received = supervisor.speak(SpeechRequest("a long one", sampling=ENDLESS))
        await anext(received)
        assert supervisor.process_id is not None
        os.kill(supervisor.process_id, signal.SIGSTOP)  # it sends nothing more, so the next requests wait
        waiting = [asyncio.create_task(collect(supervisor, short(seed))) for seed in range(6)]
        await asyncio.sleep(0.05)
        os.kill(supervisor.process_id, signal.SIGKILL)
        rest = await asyncio.gather(drain(received), return_exceptions=True)
        return rest, await asyncio.gather(*waiting)

    before = supervisor.restarts
    lost, replayed = asyncio.run(kill_under_load())
    assert isinstance(lost[0], EngineStopped)
    assert supervisor.restarts == before + 1
    assert all(chunks[-1].finish is not None and len(samples_of(chunks)) == 6 * 640 for chunks in replayed)
    alone = asyncio.run(collect(supervisor, short(3)))
    np.testing.assert_allclose(samples_of(replayed[3]), samples_of(alone), atol=1e-5)
    assert supervisor.ready


async def drain(chunks: ReplyStream) -> AudioChunk:
    last = None
    async for chunk in chunks:
        last = chunk
    assert last is not None
    return last


@pytest.mark.usefixtures("forked_engines")
def test_a_reload_drains_running_requests(supervisor: Supervisor) -> None:
    async def reload_while_speaking() -> list[AudioChunk]:
        speaking = asyncio.create_task(collect(supervisor, short(5, frames=300)))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(supervisor.reload, supervisor.source)
        assert len(samples_of(await collect(supervisor, short(6)))) == 6 * 640
        return await speaking

    before = supervisor.process_id
    assert len(samples_of(asyncio.run(reload_while_speaking()))) > 0
    assert supervisor.process_id != before


def test_a_reload_and_a_crash_at_once_leave_one_engine() -> None:
    supervisor = Supervisor(SOURCE)
    supervisor.start()
    try:
        reload = threading.Thread(target=supervisor.reload, args=(SOURCE,))
        reload.start()
        wait_until(lambda: bool(supervisor._starting))
        assert supervisor.process_id is not None
        os.kill(supervisor.process_id, signal.SIGKILL)
        wait_until(lambda: supervisor.restarts == 1)
        reload.join(240)
        wait_until(lambda: not supervisor._starting and not supervisor._retiring)
        assert samples_of(asyncio.run(collect(supervisor, short(1)))).size > 0
    finally:
        supervisor.close()


@pytest.mark.usefixtures("forked_engines")
def test_the_model_is_that_of_the_engine_that_speaks_also_when_another_gets_ready_after_it() -> None:
    """The engine crashes and is restarted while the operator reloads with another model, which is ready first."""
    supervisor = Supervisor(SOURCE)
    supervisor.start()
    try:
        assert supervisor.process_id is not None
        os.kill(supervisor.process_id, signal.SIGKILL)
        wait_until(lambda: bool(supervisor._starting))
        restarted = supervisor._starting[0]
        assert restarted.process.pid is not None
        os.kill(restarted.process.pid, signal.SIGSTOP)
        supervisor.reload(replace(SOURCE, model="random:tiny-s2"))
        os.kill(restarted.process.pid, signal.SIGCONT)
        wait_until(lambda: not supervisor._starting and not supervisor._retiring)
        assert supervisor.model_info.model == "random:tiny-s2"
    finally:
        supervisor.close()


def test_an_engine_that_does_not_read_its_pipe_blocks_no_caller(supervisor: Supervisor) -> None:
    engine = supervisor.process_id
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    try:
        command = Encode(bytes(8 << 20))  # more than a pipe buffers
        sending = threading.Thread(target=supervisor._submit, args=(command, lambda reply: None), daemon=True)
        sending.start()
        sending.join(240)
        assert not sending.is_alive()
    finally:
        os.kill(engine, signal.SIGCONT)


@pytest.mark.usefixtures("forked_engines")
def test_clients_do_not_see_why_an_engine_does_not_restart(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_random(model, random_checkpoint("tiny"))
    supervisor = Supervisor(replace(SOURCE, model=str(model)))
    supervisor.start()
    try:
        shutil.rmtree(model)
        assert supervisor.process_id is not None
        os.kill(supervisor.process_id, signal.SIGKILL)
        wait_until(lambda: not supervisor.ready)
        with pytest.raises(EngineStopped, match="try again later") as raised:
            asyncio.run(collect(supervisor, short(1)))
        assert str(tmp_path) not in str(raised.value)
    finally:
        supervisor.close()


@pytest.mark.usefixtures("forked_engines")
def test_an_engine_that_does_not_restart_cuts_no_stream_of_a_retiring_one(tmp_path: Path) -> None:
    """As when a reload leaves too little memory for another engine until the previous one has drained."""
    model = tmp_path / "model"
    save_random(model, random_checkpoint("tiny"))
    source = replace(SOURCE, model=str(model), config=EngineConfig(slots=4))
    supervisor = Supervisor(source)
    supervisor.start()

    async def reload_and_crash() -> AudioChunk:
        retiring = supervisor.process_id
        assert retiring is not None
        os.kill(retiring, signal.SIGSTOP)
        chunks = supervisor.speak(short(2))
        await asyncio.to_thread(supervisor.reload, source)
        shutil.rmtree(model)
        assert supervisor.process_id not in (None, retiring)
        os.kill(supervisor.process_id, signal.SIGKILL)
        wait_until(lambda: not supervisor.ready)
        with pytest.raises(EngineStopped, match="try again later"):
            await collect(supervisor, short(1))
        os.kill(retiring, signal.SIGCONT)
        return await drain(chunks)

    try:
        assert asyncio.run(reload_and_crash()).finish is FinishReason.LENGTH
    finally:
        supervisor.close()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_process_group_do_not_interrupt_requests(supervisor: Supervisor, sent: signal.Signals) -> None:
    async def interrupted() -> list[AudioChunk]:
        chunks = supervisor.speak(short(7, frames=40))
        received = [await anext(chunks)]
        assert supervisor.process_id is not None
        os.kill(supervisor.process_id, sent)
        return received + [chunk async for chunk in chunks]

    before = supervisor.restarts
    assert asyncio.run(interrupted())[-1].finish is not None
    assert supervisor.restarts == before


@pytest.mark.usefixtures("forked_engines")
def test_an_engine_that_hangs_is_killed_and_restarted(tmp_path: Path) -> None:
    supervisor = Supervisor(SOURCE, SupervisorConfig(hang_seconds=4.0))
    supervisor.start()
    try:
        assert supervisor.process_id is not None
        os.kill(supervisor.process_id, signal.SIGSTOP)
        chunks = asyncio.run(collect(supervisor, short(1)))
        assert len(samples_of(chunks)) == 6 * 640
        assert supervisor.restarts == 1
    finally:
        supervisor.close()


def test_a_retiring_engine_that_hangs_is_killed_and_does_not_delay_close() -> None:
    supervisor = Supervisor(SOURCE, SupervisorConfig(hang_seconds=3.0, exit_seconds=3.0))
    supervisor.start()
    hung = supervisor._current
    assert hung is not None
    assert hung.process.pid is not None
    os.kill(hung.process.pid, signal.SIGSTOP)
    supervisor.reload(SOURCE)
    wait_until(lambda: not supervisor._retiring)
    assert hung.process.exitcode == -signal.SIGKILL
    assert supervisor.process_id is not None
    os.kill(supervisor.process_id, signal.SIGSTOP)
    supervisor.close(drain=True, timeout=3600.0)
    assert not supervisor.ready


@pytest.mark.usefixtures("forked_engines")
def test_a_request_that_breaks_the_device_fails_and_the_others_are_replayed() -> None:
    source = RiggedSource("random:tiny", device="cpu", config=EngineConfig(slots=4), rig=break_the_device)
    supervisor = Supervisor(source)
    supervisor.start()

    async def together() -> list[list[AudioChunk] | BaseException]:
        seeds = (1, 2, POISON_SEED, 3)
        # Whole: a request whose first audio was sent before the device broke could not be replayed.
        wanted = [replace(short(seed), whole=True) for seed in seeds]
        return await asyncio.gather(*(collect(supervisor, each) for each in wanted), return_exceptions=True)

    try:
        *good, error = (each for each in sorted(asyncio.run(together()), key=lambda each: not isinstance(each, list)))
        assert isinstance(error, GenerationFailed)
        assert [len(samples_of(chunks)) for chunks in good if isinstance(chunks, list)] == [6 * 640] * 3
        # The second engine runs the request alone, and it is not given to a third, which may still be starting.
        wait_until(lambda: supervisor.ready and supervisor.restarts >= 2)
        assert supervisor.restarts == 2
    finally:
        supervisor.close()


@pytest.mark.usefixtures("forked_engines")
def test_an_engine_whose_thread_fails_is_restarted_and_the_request_resubmitted(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    rig = partial(break_the_thread, mark)
    supervisor = Supervisor(RiggedSource("random:tiny", device="cpu", config=EngineConfig(slots=4), rig=rig))
    supervisor.start()
    try:
        mark.touch()
        assert len(samples_of(asyncio.run(collect(supervisor, short(1))))) == 6 * 640
        assert (supervisor.restarts, supervisor.ready, mark.exists()) == (1, True, False)
    finally:
        supervisor.close()


def start_and_fail(supervisor: Supervisor) -> None:
    with pytest.raises(EngineStopped):
        supervisor.start()


@pytest.mark.parametrize("again", [False, True])
def test_close_kills_an_engine_that_is_starting(again: bool) -> None:
    supervisor = Supervisor(EngineSource("nano", device="cpu", config=EngineConfig(slots=1)))
    if again:
        supervisor.start()
        assert supervisor.process_id is not None
        os.kill(supervisor.process_id, signal.SIGKILL)
    else:
        starting = threading.Thread(target=start_and_fail, args=(supervisor,))
        starting.start()
    wait_until(lambda: bool(supervisor._starting))
    [fresh] = supervisor._starting
    supervisor.close()
    wait_until(fresh.exited.is_set)
    assert fresh.process.exitcode == -signal.SIGKILL
    assert not supervisor.ready
    if not again:
        starting.join(240)
        assert not starting.is_alive()


@pytest.mark.usefixtures("forked_engines")
def test_a_drain_waits_for_requests_whose_voice_is_still_being_encoded() -> None:
    supervisor = Supervisor(SOURCE)
    supervisor.start()
    voice = Recording(recording(seconds=20.0), "one two three")
    wanted = SpeechRequest("hello there", recordings=(voice,), sampling=Sampling(seed=1, max_frames=6))

    async def drained() -> list[AudioChunk]:
        speaking = asyncio.create_task(collect(supervisor, wanted))
        await asyncio.sleep(0)  # submitted; the engine has only started to read the recording
        await asyncio.to_thread(supervisor.close, drain=True, timeout=240)
        return await speaking

    assert asyncio.run(drained())[-1].finish is not None


class Blocked:
    """A pipe whose other end does not read until `read` is set."""

    def __init__(self) -> None:
        self.full, self.read = threading.Event(), threading.Event()

    def send(self, message: object) -> None:
        self.full.set()
        self.read.wait()


def test_reading_commands_is_not_blocked_by_sending_results() -> None:
    worker, pipe = object.__new__(EngineWorker), Blocked()
    worker._send_large = ReplyChannel(pipe).send_large  # type: ignore[arg-type]
    worker._jobs = JobRunner(1)
    worker._service = SimpleNamespace(statistics=dict)  # type: ignore[assignment]
    reading = threading.Thread(target=lambda: [worker._run_command(job, GetStats()) for job in (1, 2)], daemon=True)
    reading.start()
    assert pipe.full.wait(240)
    reading.join(240)
    held_up = reading.is_alive()
    pipe.read.set()
    assert not held_up


class RecordingPipe:
    """A pipe whose first message is held until `go_on` is set."""

    def __init__(self) -> None:
        self.sent: list[list[tuple[int, object]]] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def send(self, message: list[tuple[int, object]]) -> None:
        self.sent.append(message)
        self.begun.set()
        assert self.go_on.wait(240)


def audio(samples: int = 1) -> AudioChunk:
    return AudioChunk(np.zeros(samples, np.float32), 16_000)


def test_audio_is_sent_between_the_fragments_of_a_large_reply() -> None:
    pipe = RecordingPipe()
    channel, value = ReplyChannel(pipe), np.arange(200_000)  # type: ignore[arg-type]
    chunk = audio()
    large = threading.Thread(target=channel.send_large, args=(1, Result(value)))
    large.start()
    assert pipe.begun.wait(240)
    channel.send(2, chunk)
    pipe.go_on.set()
    large.join(240)
    channel.flush(240)
    sent = [reply for message in pipe.sent for _, reply in message]
    fragments = [each for each in sent if isinstance(each, Fragment)]
    assert len(fragments) > 3
    assert sent[1] is chunk
    process = object.__new__(EngineProcess)
    process._fragments = {}
    *parts, whole = [process._joined(1, each) for each in fragments]
    assert parts == [None] * len(parts)
    assert isinstance(whole, Result)
    np.testing.assert_array_equal(whole.value, value)
    assert process._fragments == {}


def test_the_engine_thread_does_not_wait_until_the_server_reads() -> None:
    pipe = RecordingPipe()
    channel, chunks = ReplyChannel(pipe), [audio() for _ in range(4)]  # type: ignore[arg-type]
    channel.send(1, chunks[0])
    assert pipe.begun.wait(240)
    for job, chunk in enumerate(chunks[1:], 2):
        channel.send(job, chunk)  # returns, although nothing has been read
    pipe.go_on.set()
    channel.flush(240)
    # What gathered meanwhile is one message.
    assert pipe.sent == [[(1, chunks[0])], [(2, chunks[1]), (3, chunks[2]), (4, chunks[3])]]


def test_a_reply_that_cannot_be_pickled_ends_its_request_and_no_other() -> None:
    ours, theirs = multiprocessing.Pipe()
    channel, broken = ReplyChannel(ours), ShoalError("?")
    broken.detail = lambda: None  # type: ignore[attr-defined]
    with channel._changed:  # so that both are one message
        channel._append(1, Failed(broken))
        channel._append(2, audio())
    (first, failed), (second, chunk) = *theirs.recv(), *theirs.recv()
    assert (first, second) == (1, 2)
    assert isinstance(failed.error, InternalError)
    assert isinstance(chunk, AudioChunk)


def test_audio_that_a_server_does_not_read_is_bounded() -> None:
    pipe = RecordingPipe()
    channel = ReplyChannel(pipe)  # type: ignore[arg-type]
    channel.send(1, audio())
    assert pipe.begun.wait(240)
    large = audio(1 + MAX_QUEUED_BYTES // 4)
    channel.send(1, large)
    waiting = threading.Thread(target=channel.send, args=(1, audio()), daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    pipe.go_on.set()
    waiting.join(240)
    assert not waiting.is_alive()


@pytest.mark.usefixtures("forked_engines")
def test_start_raises_the_error_of_a_model_that_cannot_be_loaded() -> None:
    with pytest.raises(ModelNotFound):
        Supervisor(EngineSource("random:none")).start()


def test_an_engine_that_is_closed_after_a_request_exits_with_code_0() -> None:
    supervisor = Supervisor(EngineSource("nano", device="cpu", config=EngineConfig(slots=1)))
    supervisor.start()
    engine = next(child for child in multiprocessing.active_children() if child.pid == supervisor.process_id)
    asyncio.run(collect(supervisor, short(1)))
    supervisor.close()
    assert engine.exitcode == 0


@pytest.mark.usefixtures("forked_engines")
def test_after_close_requests_are_refused_and_the_process_has_exited(tmp_path: Path) -> None:
    supervisor = Supervisor(SOURCE)
    supervisor.start()
    process = supervisor.process_id
    assert process is not None
    supervisor.close()
    with pytest.raises(EngineStopped):
        asyncio.run(collect(supervisor, short(1)))
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_only_speech_counts_against_the_queue_limit() -> None:
    supervisor = Supervisor(EngineSource("random:tiny", config=EngineConfig(slots=1, max_waiting=1)))  # not started
    supervisor._submit(Speak(short(1)), print)
    supervisor._submit(GetStats(), print)
    supervisor._submit(ReleaseMemory(), print)
    supervisor._submit(Speak(short(2)), print)
    with pytest.raises(EngineBusy):
        supervisor._submit(Speak(short(3)), print)


def test_backends_reported_by_heartbeats_are_those_of_the_current_process() -> None:
    supervisor = Supervisor(SOURCE)
    info = SimpleNamespace(backends=Backends("graph", "graph"))
    current, retiring = (SimpleNamespace(model_info=info, record_heartbeat=lambda _: None) for _ in range(2))
    supervisor._current, supervisor._model_info = current, info  # type: ignore[assignment]
    now = Backends("plain-graph", "eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.engine.process.supervisor.replace", lambda _, **fields: SimpleNamespace(**fields))
        supervisor._on_reply(retiring, 0, Heartbeat(1, 0, now))  # type: ignore[arg-type]
        assert supervisor.model_info.backends == Backends("graph", "graph")
        supervisor._on_reply(current, 0, Heartbeat(1, 0, now))  # type: ignore[arg-type]
        assert supervisor.model_info.backends == now


@pytest.mark.usefixtures("forked_engines")
def test_a_batch_size_that_fails_with_clients_connected_loses_no_request(supervisor: Supervisor) -> None:
    async def together(engine: Supervisor) -> list[list[AudioChunk]]:
        return await asyncio.gather(*(collect(engine, short(seed)) for seed in range(3)))

    # The static policy waits until all three requests are there, so the first step has three rows.
    config = EngineConfig(
        slots=3, backend="plain-graph", buckets=(1,), policy="static", batch_size=3, batch_seconds=10.0
    )
    broken = Supervisor(RiggedSource("random:tiny", device="cpu", config=config, rig=break_batches))
    broken.start()
    try:
        for ours, theirs in zip(asyncio.run(together(broken)), asyncio.run(together(supervisor)), strict=True):
            np.testing.assert_allclose(samples_of(ours), samples_of(theirs), atol=1e-3)
        statistics = broken.statistics()
        assert statistics["steps"]["failed"] == 1
        assert statistics["dropped_sizes"] == 1
        assert broken.restarts == 0
        assert broken.model_info.backends.model == statistics["backends"]["model"] == "plain-graph"
    finally:
        broken.close()
