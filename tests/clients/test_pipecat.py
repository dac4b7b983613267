"""Pipecat's Fish Audio service, as published, against a running server. Only its fixed address is replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    EndFrame,
    ErrorFrame,
    Frame,
    InterruptionFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStoppedFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.fish.tts import FishAudioTTSService
from pipecat.workers.runner import WorkerRunner

from tests.clients.conftest import KEY
from tests.server.conftest import Serving
from tests.waiting import wait_until

RATE = 16_000


class Ear(FrameProcessor):
    """The end of the pipeline: collects what a transport would play."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame | TTSStoppedFrame | ErrorFrame):
            await self.frames.put(frame)
        await self.push_frame(frame, direction)

    async def audio(self) -> TTSAudioRawFrame:
        """Return the next frame of audio."""
        while True:
            frame = await asyncio.wait_for(self.frames.get(), 60)
            assert not isinstance(frame, ErrorFrame), frame
            if isinstance(frame, TTSAudioRawFrame):
                return frame

    async def reply(self) -> bytes:
        """Return the audio up to the end of a reply."""
        audio = b""
        while True:
            frame = await asyncio.wait_for(self.frames.get(), 60)
            assert not isinstance(frame, ErrorFrame), frame
            if isinstance(frame, TTSStoppedFrame):
                return audio
            if isinstance(frame, TTSAudioRawFrame):
                assert (frame.sample_rate, frame.num_channels) == (RATE, 1)
                audio += frame.audio


def service(server: Serving, **settings: Any) -> FishAudioTTSService:
    made = FishAudioTTSService(api_key=KEY, settings=FishAudioTTSService.Settings(voice="gb_f", **settings))
    made._base_url = server.url.replace("http", "ws", 1) + "/v1/tts/live"
    return made


@asynccontextmanager
async def conversation(speaker: FishAudioTTSService) -> AsyncIterator[tuple[PipelineWorker, Ear]]:
    """A pipeline with the service, as an agent has it."""
    ear = Ear()
    worker = PipelineWorker(
        Pipeline([speaker, ear]),
        params=PipelineParams(audio_out_sample_rate=RATE),
        cancel_on_idle_timeout=False,
        enable_rtvi=False,
    )
    started = asyncio.Event()

    async def on_started(*_: object) -> None:
        started.set()

    worker.add_event_handler("on_pipeline_started", on_started)
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    try:
        await asyncio.wait_for(started.wait(), 60)
        yield worker, ear
    finally:
        await worker.queue_frame(EndFrame())
        await asyncio.wait_for(running, 60)


@pytest.mark.parametrize(
    "settings", [{}, {"latency": "low", "prosody_normalize_loudness": True, "condition_on_previous_chunks": False}]
)
def test_the_service_speaks_several_replies_over_one_connection(nano: Serving, settings: dict[str, Any]) -> None:
    speaker = service(nano, **settings)

    async def talk() -> None:
        async with conversation(speaker) as (worker, ear):
            sockets = set()
            for text in ("Hello there.", "How are you today?"):
                await worker.queue_frame(TTSSpeakFrame(text))
                samples = np.frombuffer(await ear.reply(), np.int16)
                assert 0.2 < len(samples) / RATE < 10
                assert np.abs(samples).max() > 1000
                sockets.add(id(speaker._websocket))
            assert len(sockets) == 1

    asyncio.run(talk())


def test_an_interrupted_reply_frees_its_place_and_the_next_one_is_spoken(nano: Serving) -> None:
    async def talk() -> None:
        async with conversation(service(nano)) as (worker, ear):
            await worker.queue_frame(TTSSpeakFrame("One two three four five six seven eight nine ten. " * 5))
            await ear.audio()
            await worker.queue_frame(BotStartedSpeakingFrame(), FrameDirection.UPSTREAM)
            await worker.queue_frame(InterruptionFrame())
            with nano.client() as http:
                await asyncio.to_thread(wait_until, lambda: http.get("/ready").json()["under_way"] == 0)
            while not ear.frames.empty():
                ear.frames.get_nowait()
            await worker.queue_frame(TTSSpeakFrame("Sorry."))
            assert len(await ear.reply()) > 2 * RATE // 10

    asyncio.run(talk())
