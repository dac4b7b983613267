"""One request being spoken: a task makes the bytes, a pipe holds them, a response sends them.

The maker never waits for the network, so a slow reader holds no slot. Whoever leaves, for whatever reason, ends the
task, and with it the utterance at the engine's next step.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from shoal.api.accounting import Tally
from shoal.api.byte_buffer import Pipe
from shoal.api.disconnect import gone
from shoal.api.engine_client import SpeechService
from shoal.api.output import Renderer, Rendering
from shoal.errors import DeadlineExceeded, ShoalError
from shoal.server.keys import Key
from shoal.server.state import Desk
from shoal.speech import AudioChunk, SpeechRequest

logger = logging.getLogger(__name__)

# The engine ends its requests itself; this is for an engine that does not answer.
GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Order:
    """What to speak, into which bytes, for whom."""

    api: str
    request: SpeechRequest
    rendering: Rendering
    key: Key
    id: str

    @property
    def stream(self) -> bool:
        return not self.request.whole


class Performance:
    """Begins at once. Raises what `Tally` raises, and NotReady."""

    def __init__(self, desk: Desk, order: Order) -> None:
        limits = desk.config.limits
        self._desk, self._order = desk, order
        self.service = desk.host.engine().service
        self.tally = Tally(desk, order.api, order.key, order.id)
        self.pipe = Pipe(limits.buffer_bytes, limits.slow_reader)
        self._task = asyncio.create_task(self._make())
        self._watch: asyncio.Task[None] | None = None

    def end_when_gone(self, receive: Receive) -> None:
        """Watch the connection: when it is lost, so is the interest. Only after the body has been read."""
        self._watch = asyncio.create_task(self._until_gone(receive))

    def when_made(self, then: Callable[[], None]) -> None:
        """Called when the last byte is made, or none will be; readers may still be reading."""
        self._task.add_done_callback(lambda _: then())

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pipe.pieces()])

    def close(self) -> None:
        """Stop making, if it goes on, and watching."""
        self._task.cancel()
        # A task that never ran has no end of its own.
        self.tally.end(asyncio.CancelledError())
        self.pipe.close(ClientDisconnect())
        if self._watch is not None:
            self._watch.cancel()

    async def _until_gone(self, receive: Receive) -> None:
        await gone(receive)
        self._watch = None
        self.close()

    async def _make(self) -> None:
        ended_by: BaseException | None = None
        try:
            await self._speak()
        except asyncio.CancelledError as left:
            ended_by = left
            raise
        except Exception as problem:
            ended_by = problem
            if not isinstance(problem, ShoalError):
                logger.exception("%s ended in a bug", self._order.id)
        finally:
            # A reader may take its time; recordings need not wait for it.
            self._order = replace(self._order, request=replace(self._order.request, recordings=()))
            self.tally.end(ended_by)
            self.pipe.close(ended_by)

    async def _speak(self) -> None:
        desk, order = self._desk, self._order
        renderer = await desk.encode(Renderer, order.rendering, self.service.sample_rate, stream=order.stream)
        async with aclosing(chunks_in_time(self.service, order.request)) as chunks:
            async for chunk in chunks:
                self.tally.heard(chunk)
                await self.pipe.put(await self._rendered(renderer.feed, chunk.samples))
        await self.pipe.put(await self._rendered(renderer.finish))

    async def _rendered(self, work: Callable[..., bytes], *given: object) -> bytes:
        began = time.perf_counter()
        piece = await self._desk.encode(work, *given)
        self._desk.metrics.encoding_seconds.labels(self._order.rendering.format).inc(time.perf_counter() - began)
        return piece


async def chunks_in_time(service: SpeechService, request: SpeechRequest) -> AsyncGenerator[AudioChunk, None]:
    """The chunks of a request; DeadlineExceeded when it takes longer than its own timeout."""
    loop = asyncio.get_running_loop()
    until = None if request.timeout is None else loop.time() + request.timeout + GRACE_SECONDS
    async with aclosing(service.speak(request)) as chunks:
        while True:
            try:
                async with asyncio.timeout_at(until):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded("the engine did not answer in time") from None
            yield chunk
