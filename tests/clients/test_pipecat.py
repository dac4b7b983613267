"""Pipecat's Fish Audio service, as published, against a running server. Only its fixed address is replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
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
from tests.nano import OTHER_VOICE
from tests.server.conftest import Serving
from tests.waiting import TIMEOUT_SECONDS, wait_until

RATE = 16_000


class AudioCollector(FrameProcessor):
    """The end of the pipeline: collects what a transport would play."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame | TTSStoppedFrame | ErrorFrame):
            await self.frames.put(frame)
        await self.push_frame(frame, direction)

    async def next(self) -> TTSAudioRawFrame | TTSStoppedFrame:
        frame = await asyncio.wait_for(self.frames.get(), 240)
        assert isinstance(frame, TTSAudioRawFrame | TTSStoppedFrame), frame
        return frame

    def forget(self) -> None:
        while not self.frames.empty():
            self.frames.get_nowait()


class Conversation:
    """A running pipeline. Pipecat ends a reply after 3 s without audio; on a slower machine it is asked for again."""

    def __init__(self, worker: PipelineWorker, collector: AudioCollector) -> None:
        self.worker, self.collector = worker, collector

    async def begin(self, text: str) -> bytes:
        """Say a text and return the first of its audio."""
        while True:
            await self.worker.queue_frame(TTSSpeakFrame(text))
            frame = await self.collector.next()
            if isinstance(frame, TTSAudioRawFrame):
                assert (frame.sample_rate, frame.num_channels) == (RATE, 1)
                return frame.audio

    async def reply(self, text: str) -> np.ndarray:
        """Say a text and return its samples."""
        audio = await self.begin(text)
        while isinstance(frame := await self.collector.next(), TTSAudioRawFrame):
            audio += frame.audio
        return np.frombuffer(audio, np.int16)


def service(server: Serving, **settings: Any) -> FishAudioTTSService:
    made = FishAudioTTSService(api_key=KEY, settings=FishAudioTTSService.Settings(voice=OTHER_VOICE, **settings))
    made._base_url = server.url.replace("http", "ws", 1) + "/v1/tts/live"
    return made


@asynccontextmanager
async def conversation(speaker: FishAudioTTSService) -> AsyncIterator[Conversation]:
    """A pipeline with the service, as an agent has it."""
    collector = AudioCollector()
    worker = PipelineWorker(
        Pipeline([speaker, collector]),
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
        await asyncio.wait_for(started.wait(), TIMEOUT_SECONDS)
        yield Conversation(worker, collector)
    finally:
        await worker.queue_frame(EndFrame())
        await asyncio.wait_for(running, TIMEOUT_SECONDS)


def test_the_service_speaks_several_replies_over_one_connection(nano: Serving) -> None:
    speaker = service(nano)

    async def talk() -> None:
        async with conversation(speaker) as agent:
            sockets = set()
            for text in ("Hello there.", "How are you today?"):
                samples = await agent.reply(text)
                assert 0.2 < len(samples) / RATE < 10
                assert np.abs(samples).max() > 1000
                sockets.add(id(speaker._websocket))
            assert len(sockets) == 1

    asyncio.run(talk())


def test_an_interrupted_reply_frees_its_place_and_the_next_one_is_spoken(nano: Serving) -> None:
    settings = {"latency": "low", "prosody_normalize_loudness": True, "condition_on_previous_chunks": False}

    async def talk() -> None:
        async with conversation(service(nano, **settings)) as agent:
            await agent.begin("One two three four five six seven eight nine ten. " * 5)
            await agent.worker.queue_frame(BotStartedSpeakingFrame(), FrameDirection.UPSTREAM)
            await agent.worker.queue_frame(InterruptionFrame())
            with nano.client() as http:
                await asyncio.to_thread(wait_until, lambda: http.get("/ready").json()["in_flight"] == 0)
            agent.collector.forget()
            assert await agent.begin("Sorry.")

    asyncio.run(talk())
