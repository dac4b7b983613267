import asyncio
import gc
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from shoal.api.config import Limits, ServerConfig
from shoal.api.engine_client import EngineHandle, EngineLifecycle
from shoal.api.exceptions import SlowReader
from shoal.api.keys import ANONYMOUS
from shoal.api.output import OutputEncoder, OutputOptions
from shoal.api.requests import SpeechJob
from shoal.api.speech_stream import ByteBuffer, SpeechStream
from shoal.api.state import ServerState, create_state
from shoal.config import EngineConfig
from shoal.engine.process.messages import Speak
from shoal.engine.process.supervisor import Supervisor
from shoal.engine.process.worker import EngineSource
from shoal.errors import EngineBusy, MissingExtra
from shoal.speech import AudioChunk, FinishReason, Recording, Samples, SpeechRequest
from shoal.voices.store import VoiceStore
from tests.engine.clock import FakeClock


def test_pieces_are_read_in_the_order_they_were_written() -> None:
    async def run() -> list[bytes]:
        buffer = ByteBuffer(100, "end")

        async def write() -> None:
            for number in range(20):
                await buffer.put(bytes([number]))
                await asyncio.sleep(0)
            buffer.close()

        task = asyncio.create_task(write())
        await buffer.wait_for_data()
        pieces = [piece async for piece in buffer.read()]
        await task
        return pieces

    assert asyncio.run(run()) == [bytes([number]) for number in range(20)]


def test_a_full_buffer_fails_the_writer() -> None:
    async def run() -> None:
        buffer = ByteBuffer(10, "end")
        await buffer.put(b"12345678")
        with pytest.raises(SlowReader):
            await buffer.put(b"12345678")

    asyncio.run(run())


def test_a_full_buffer_pauses_the_writer_if_the_policy_says_so() -> None:
    async def run() -> list[bytes]:
        buffer = ByteBuffer(10, "pause")

        async def write() -> None:
            for _ in range(5):
                await buffer.put(b"12345678")
            buffer.close()

        task = asyncio.create_task(write())
        await asyncio.sleep(0.01)
        assert not task.done()
        return [piece async for piece in buffer.read()]

    assert asyncio.run(run()) == [b"12345678"] * 5


def test_an_error_is_raised_after_the_pieces_before_it() -> None:
    async def run() -> None:
        buffer = ByteBuffer(10, "end")
        await buffer.put(b"a")
        buffer.close(ValueError("broken"))
        await buffer.wait_for_data()
        reading = buffer.read()
        assert await anext(reading) == b"a"
        with pytest.raises(ValueError, match="broken"):
            await anext(reading)

    asyncio.run(run())


@pytest.fixture
def unstarted() -> Supervisor:
    """A supervisor whose engine does not start: jobs stay in its queue."""
    supervisor = Supervisor(EngineSource("random:tiny", config=EngineConfig(slots=1, max_waiting=0)))
    supervisor._model_info = SimpleNamespace(sample_rate=16_000)  # type: ignore[assignment]
    return supervisor


@pytest.fixture
def job(unstarted: Supervisor, tmp_path: Path) -> SpeechJob:
    engine = EngineHandle(unstarted, VoiceStore(tmp_path), 25.0)
    return SpeechJob("fish", SpeechRequest("Hello.", timeout=30.0), OutputOptions("pcm"), engine, ANONYMOUS, "id")


@pytest.fixture
def state(job: SpeechJob) -> ServerState:
    return create_state(ServerConfig(limits=Limits()), EngineLifecycle(lambda: job.engine, job.engine), 4)


def test_a_job_is_submitted_at_once_with_the_deadline_of_its_admission(
    state: ServerState, job: SpeechJob, unstarted: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the first step of its task: before that, the event loop parses all other requests of a burst."""
    monkeypatch.setattr(time, "monotonic", FakeClock(now=100.0))

    async def submit() -> Speak:
        stream = SpeechStream(state, job)
        command = unstarted._queued[0].command
        stream.close()
        assert isinstance(command, Speak)
        return command

    assert asyncio.run(submit()).deadline == 130.0


def test_a_closed_stream_makes_room_for_the_next_job_at_once(
    state: ServerState, job: SpeechJob, unstarted: Supervisor
) -> None:
    """The queue of the engine has one place; neither task has begun, or could have cancelled its request."""

    async def submit_two() -> None:
        SpeechStream(state, job).close()
        assert unstarted._queued == []
        SpeechStream(state, job).close()

    asyncio.run(submit_two())
    assert unstarted._queued == []
    assert state.queue.in_flight == 0


def test_a_stream_that_cannot_encode_cancels_its_request(
    state: ServerState, job: SpeechJob, unstarted: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.api.speech_stream.OutputEncoder", Mock(side_effect=MissingExtra("no encoder")))

    async def read() -> None:
        await SpeechStream(state, job).buffer.wait_for_data()

    with pytest.raises(MissingExtra):
        asyncio.run(read())
    assert unstarted._queued == []
    assert state.queue.in_flight == 0


def test_recordings_are_released_when_generation_ends_not_when_the_client_has_read(
    state: ServerState, job: SpeechJob, unstarted: Supervisor
) -> None:
    def held() -> int:
        gc.collect()
        # Not isinstance: it asks objects of other libraries for their class, and some of them warn.
        return sum(type(each) is Recording and each.transcript == "held" for each in gc.get_objects())

    async def generate() -> None:
        request = replace(job.request, recordings=(Recording(b"audio", "held"),))
        stream, generated = SpeechStream(state, replace(job, request=request)), asyncio.Event()
        del request
        stream.on_generated(generated.set)
        assert held() == 1
        unstarted._queued.pop().deliver(AudioChunk(np.zeros(1_000, np.float32), 16_000, FinishReason.STOP))
        await generated.wait()
        assert held() == 0
        assert any([piece async for piece in stream.buffer.read()])

    asyncio.run(generate())


def test_a_job_that_the_engine_refuses_leaves_no_place_taken(
    state: ServerState, job: SpeechJob, unstarted: Supervisor
) -> None:
    async def submit_two() -> None:
        stream = SpeechStream(state, job)
        with pytest.raises(EngineBusy):
            SpeechStream(state, job)
        assert state.queue.in_flight == 1
        stream.close()

    asyncio.run(submit_two())
    assert state.queue.in_flight == 0
    assert unstarted._queued == []


@pytest.mark.parametrize("format", ["mp3", "pcm"])  # encoded in a thread, and on the event loop
def test_an_encoder_that_fails_in_the_middle_ends_the_stream_and_cancels_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    feed, fed, closed = OutputEncoder.feed, list[int](), list[bool]()

    def fail_on_the_second_chunk(encoder: OutputEncoder, samples: Samples) -> bytes:
        fed.append(len(samples))
        if len(fed) == 2:
            raise OSError("the encoder is broken")
        return feed(encoder, samples)

    class Service:
        sample_rate = 44_100

        async def speak(self, *_: object) -> AsyncGenerator[AudioChunk, None]:
            try:
                while True:
                    yield AudioChunk(np.zeros(44_100, np.float32), self.sample_rate)
            finally:
                closed.append(True)

    monkeypatch.setattr(OutputEncoder, "feed", fail_on_the_second_chunk)
    engine = EngineHandle(Service(), VoiceStore(tmp_path), 25.0)  # type: ignore[arg-type]
    state = create_state(ServerConfig(limits=Limits()), EngineLifecycle(lambda: engine, engine), 4)
    job = SpeechJob("openai", SpeechRequest("Hello."), OutputOptions(format), engine, ANONYMOUS, "req-7")

    pieces = list[bytes]()

    async def read() -> None:
        async for piece in SpeechStream(state, job).buffer.read():
            pieces.append(piece)

    with pytest.raises(OSError, match="broken"):
        asyncio.run(read())
    assert any(pieces)
    assert (len(fed), closed) == (2, [True])
    assert state.queue.in_flight == 0
    assert "req-7: internal error" in caplog.text
