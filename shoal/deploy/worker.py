"""Serve requests without HTTP, for platforms that bring their own protocol (SageMaker, Triton, RunPod).

The engine runs in the platform's process, which the platform monitors and restarts.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from shoal.api.bodies.parsing import validated
from shoal.api.bodies.schemas import Invocation, OpenAISpeech, SpeechBody
from shoal.api.engine_client import EngineLifecycle, engine_handle
from shoal.api.exceptions import wrong_field
from shoal.api.keys import ANONYMOUS
from shoal.api.requests import SpeechJob, fish_job, openai_job
from shoal.api.speech_stream import SpeechStream
from shoal.api.state import ServerState, create_state
from shoal.engine.load import load_service
from shoal.settings import Settings

T = TypeVar("T")


def open_worker(settings: Settings) -> ServerState:
    """Load an engine in this process and return the state to serve it. Blocks. Raises ShoalError."""
    source = settings.source()
    service = load_service(source)
    engine = engine_handle(service, service.model_info(), source, settings.voice_directory())
    # The platform authenticates its callers and meters their usage.
    config = replace(settings.server(), api_keys=(), keys_file=None, upcoming_keys_file=None, usage_file=None)
    return create_state(config, EngineLifecycle(lambda: engine, engine), source.config.slots)


def close_worker(state: ServerState) -> None:
    engine = state.lifecycle.engine
    if engine is not None:
        engine.service.close()
    state.encoder_pool.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def speech_stream(state: ServerState, content: Any, id: str) -> AsyncIterator[tuple[SpeechJob, SpeechStream]]:
    """Run a body of the Fish or of the OpenAI API; leaving the context cancels it. Raises ShoalError."""
    job = job_for(validated(Invocation, content).root, state, id)
    stream = SpeechStream(state, job)
    try:
        yield job, stream
    finally:
        stream.close()


def job_for(content: dict[str, Any], state: ServerState, id: str) -> SpeechJob:
    """Return the job of a Fish or OpenAI body. Raises ModelNotFound, InvalidRequest or a subclass."""
    engine = state.lifecycle.require_engine()
    if "input" not in content:
        body = validated(SpeechBody, content)
        return fish_job(body, engine, state.config.limits, ANONYMOUS, id, api="sagemaker")
    speech = validated(OpenAISpeech, content)
    if speech.stream_format != "audio":
        raise wrong_field("stream_format", "server-sent events need HTTP: use `audio`, which is sent in pieces here")
    return openai_job(speech, engine, state.config, ANONYMOUS, id)


class EventLoopThread:
    """Event loop in a daemon thread, for platforms that call synchronous functions."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shoal-worker", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.submit(work).result()

    def close(self) -> None:
        """Cancel running tasks and stop the thread."""
        self.wait(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
