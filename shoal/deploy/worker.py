"""The server's desk without HTTP, for hosts that bring a protocol of their own.

The engine is in the host's process: the platform watches that process and starts it again.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from shoal.api.exceptions import wrong_field
from shoal.api.fish_body import SpeechBody
from shoal.api.host import Host
from shoal.api.speech_stream import Order, Performance
from shoal.engine.load import load_service
from shoal.server.keys import ANYONE
from shoal.server.parsing import validated
from shoal.server.routes.fish import fish_order
from shoal.server.routes.openai import OpenAISpeech, openai_order
from shoal.server.routes.sagemaker import Invocation
from shoal.server.run import loaded
from shoal.server.state import Desk, open_desk
from shoal.settings import Settings

T = TypeVar("T")


def open_worker(settings: Settings) -> Desk:
    """An engine that is ready to speak, behind a desk. Takes a while. Raises ShoalError."""
    source = settings.source()
    service = load_service(source)
    ready = loaded(service, service.model_info(), source, settings.voice_directory())
    # The platform has asked for keys, and counts what they use.
    config = replace(settings.server(), api_keys=(), keys_file=None, usage_file=None)
    return open_desk(config, Host(lambda: ready, ready), source.config.slots)


def close_worker(desk: Desk) -> None:
    ready = desk.host.loaded
    if ready is not None:
        ready.service.close()
    desk.encoders.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def performing(desk: Desk, content: Any, id: str) -> AsyncIterator[tuple[Order, Performance]]:
    """Speak a body of the Fish or of the OpenAI API; leaving ends it. Raises ShoalError."""
    order = await order_of(validated(Invocation, content).root, desk, id)
    performance = Performance(desk, order)
    try:
        yield order, performance
    finally:
        performance.close()


async def order_of(content: dict[str, Any], desk: Desk, id: str) -> Order:
    """Raises SchemaViolation and its kin for what cannot be done."""
    if "input" not in content:
        return fish_order(validated(SpeechBody, content), desk, ANYONE, id, api="sagemaker")
    body = validated(OpenAISpeech, content)
    if body.stream_format != "audio":
        raise wrong_field("stream_format", "events are for HTTP: here the audio itself is sent, in pieces")
    return await openai_order(body, desk, ANYONE, id)


class EventLoopThread:
    """An event loop in a thread of its own, for hosts that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shoal-worker", daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.begin(work).result()

    def close(self) -> None:
        """What is still being spoken is cancelled."""
        self.wait(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
