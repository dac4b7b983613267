import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.api.config import Limits, ServerConfig
from shoal.api.engine_client import EngineHandle, EngineLifecycle
from shoal.api.exceptions import SlowReader
from shoal.api.keys import ANONYMOUS
from shoal.api.output import OutputOptions
from shoal.api.requests import SpeechJob
from shoal.api.speech_stream import ByteBuffer, SpeechStream
from shoal.api.state import create_state
from shoal.engine.process.messages import Speak
from shoal.engine.process.supervisor import Supervisor
from shoal.engine.process.worker import EngineSource
from shoal.speech import SpeechRequest
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


def test_time_between_admission_and_submission_counts_against_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(now=100.0)
    monkeypatch.setattr(time, "monotonic", clock)
    supervisor = Supervisor(EngineSource("random:tiny"))  # not started, so its jobs stay in its queue
    supervisor._model_info = SimpleNamespace(sample_rate=16_000)  # type: ignore[assignment]
    engine = EngineHandle(supervisor, VoiceStore(tmp_path), 25.0)
    state = create_state(ServerConfig(limits=Limits()), EngineLifecycle(lambda: engine, engine), 4)
    job = SpeechJob("fish", SpeechRequest("Hello.", timeout=30.0), OutputOptions("pcm"), engine, ANONYMOUS, "id")

    async def submit() -> Speak:
        stream = SpeechStream(state, job)  # admitted
        clock.now += 7.0  # the event loop is busy with other requests
        while not supervisor._queued:
            await asyncio.sleep(0)
        command = supervisor._queued[0].command
        stream.close()
        assert isinstance(command, Speak)
        return command

    assert asyncio.run(submit()).deadline == 130.0
