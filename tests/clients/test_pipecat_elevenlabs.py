"""Pipecat's ElevenLabs services, over the WebSocket and over HTTP, in a pipeline."""

import asyncio
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from pipecat.frames.frames import (
    BotStoppedSpeakingFrame,
    CancelFrame,
    ErrorFrame,
    Frame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.workers.runner import WorkerRunner

from tests.clients.conftest import KEY
from tests.nano import OTHER_VOICE, is_plausible
from tests.server.conftest import Serving

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the package still defines its own old names
    from pipecat.services.elevenlabs.tts import ElevenLabsHttpTTSService, ElevenLabsTTSService
    from pipecat.services.tts_service import TTSService

RATE = 16_000
# Seconds without audio after which Pipecat ends a reply; its default, 3, is too short for a busy machine.
PATIENCE = 120.0
MakeService = Callable[[Serving, aiohttp.ClientSession], TTSService]


def websocket_service(nano: Serving, _: aiohttp.ClientSession) -> TTSService:
    settings = ElevenLabsTTSService.Settings(voice=OTHER_VOICE)
    url = nano.url.replace("http", "ws")
    return ElevenLabsTTSService(
        api_key=KEY, url=url, settings=settings, sample_rate=RATE, stop_frame_timeout_s=PATIENCE
    )


def http_service(nano: Serving, session: aiohttp.ClientSession) -> TTSService:
    settings = ElevenLabsHttpTTSService.Settings(voice=OTHER_VOICE)
    return ElevenLabsHttpTTSService(
        api_key=KEY,
        base_url=nano.url,
        aiohttp_session=session,
        settings=settings,
        sample_rate=RATE,
        stop_frame_timeout_s=PATIENCE,
    )


class Listener(FrameProcessor):
    """The end of the pipeline, in place of a loudspeaker: counts audio, and says when it has been played."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.words: list[tuple[str, int]] = []  # with the nanosecond at which each begins
        self.errors: list[str] = []
        self.received, self.stopped, self.interrupted = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            assert (frame.sample_rate, frame.num_channels) == (RATE, 1)
            self.seconds += len(frame.audio) / 2 / RATE
            self.received.set()
        elif isinstance(frame, TTSTextFrame):
            assert frame.pts is not None, "the word has a time"
            self.words.append((frame.text, frame.pts))
        elif isinstance(frame, InterruptionFrame):
            self.interrupted.set()
        elif isinstance(frame, TTSStoppedFrame):
            self.stopped.set()
            await self.push_frame(BotStoppedSpeakingFrame(), FrameDirection.UPSTREAM)
        await self.push_frame(frame, direction)


class Errors(FrameProcessor):
    """The begin of the pipeline: collects errors, which travel upstream."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, ErrorFrame):
            self._listener.errors.append(frame.error)
            self._listener.stopped.set()
            self._listener.received.set()
        await self.push_frame(frame, direction)


@asynccontextmanager
async def pipeline(service: TTSService) -> AsyncIterator[tuple[PipelineWorker, Listener]]:
    listener = Listener()
    params = PipelineParams(audio_out_sample_rate=RATE)
    worker = PipelineWorker(
        Pipeline([Errors(listener), service, listener]), cancel_on_idle_timeout=False, enable_rtvi=False, params=params
    )
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def on_started(worker: PipelineWorker, frame: Frame) -> None:
        started.set()

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    try:
        await started.wait()
        yield worker, listener
    finally:
        await worker.queue_frame(CancelFrame())
        await running


async def reply(worker: PipelineWorker, *words: str) -> None:
    await worker.queue_frame(LLMFullResponseStartFrame())
    for word in words:
        await worker.queue_frame(LLMTextFrame(word))
    await worker.queue_frame(LLMFullResponseEndFrame())


def run(nano: Serving, make: MakeService, talk: Callable[[PipelineWorker, Listener], Awaitable[None]]) -> None:
    async def session() -> None:
        async with (
            asyncio.timeout(240),
            aiohttp.ClientSession() as http,
            pipeline(make(nano, http)) as (worker, received),
        ):
            await talk(worker, received)

    asyncio.run(session())


@pytest.mark.parametrize("make", [websocket_service, http_service])
def test_a_reply_is_spoken(nano: Serving, make: MakeService) -> None:
    async def talk(worker: PipelineWorker, listener: Listener) -> None:
        words = ("Good ", "morning. ", "The tide ", "is coming in.")
        await reply(worker, *words)
        await listener.stopped.wait()
        assert listener.errors == []
        assert is_plausible(listener.seconds, "".join(words))
        check_words(listener.words, "".join(words), listener.seconds)

    run(nano, make, talk)


def check_words(words: list[tuple[str, int]], text: str, seconds: float) -> None:
    assert [word for word, _ in words] == text.split()
    times = [time for _, time in words]
    assert times == sorted(times)
    assert len(set(times)) > len(times) // 2, "a very short word may share the start of the next one"
    assert 0 < (times[-1] - times[0]) / 1e9 < seconds


def test_an_interrupted_reply_makes_way_for_the_next(nano: Serving) -> None:
    async def talk(worker: PipelineWorker, listener: Listener) -> None:
        await reply(worker, *("One sentence follows another. " for _ in range(4)))
        await listener.received.wait()
        await worker.queue_frame(InterruptionFrame())
        await listener.interrupted.wait()
        listener.stopped.clear()
        before = listener.seconds
        await reply(worker, "It is going out.")
        await listener.stopped.wait()
        assert listener.errors == []
        assert is_plausible(listener.seconds - before, "It is going out.")

    run(nano, websocket_service, talk)
