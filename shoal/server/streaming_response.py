"""Respond with speech: whole, or streamed while it is generated.

A streamed response cannot report an error by status once it has started: the connection is closed before the
terminating chunk, which every HTTP client detects, and the cause is in the log and the metrics under the request id.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from shoal.api.accounting import Work, run_admitted
from shoal.api.exceptions import ClientDisconnected, SlowReader, error_code
from shoal.api.keys import Key
from shoal.api.requests import SpeechJob, response_headers, spoken_text_header
from shoal.api.speech_stream import SpeechStream
from shoal.api.state import ServerState
from shoal.server.middleware.request_id import request_id
from shoal.server.request_body import release_body
from shoal.speech import Word

logger = logging.getLogger(__name__)

# ASGI extensions of our protocol classes: close the connection, limit the size of WebSocket messages.
CLOSE_CONNECTION = "shoal.close_connection"
LIMIT_MESSAGES = "shoal.limit_messages"

Transform = Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]

T = TypeVar("T")


class SpeechResponse(Response):
    """Streams the audio of `stream`. `transform` wraps it in another format, such as server-sent events."""

    def __init__(
        self,
        stream: SpeechStream,
        state: ServerState,
        request_id: str,
        *,
        media_type: str,
        headers: dict[str, str],
        transform: Transform | None = None,
    ) -> None:
        self._stream, self._state, self._id = stream, state, request_id
        self._transform = transform or (lambda pieces: pieces)
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers(headers)
        # `init_headers` sets the length of the empty body; the real length is unknown.
        del self.headers["content-length"]
        # nginx and proxies like it would hold back the first 4 KiB: a second of opus.
        self.headers["X-Accel-Buffering"] = "no"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece in self._transform(self._stream.buffer.read()):
                await self._send(send, piece)
            await send({"type": "http.response.body", "body": b""})
        except (ClientDisconnect, ClientDisconnected, OSError):
            pass  # RequestAccounting has counted the disconnect
        except Exception as error:  # noqa: BLE001 - edge: a response that has started can only break the connection
            self._record(error)
            await close_connection(scope, immediately=isinstance(error, SlowReader))
        finally:
            self._stream.close()

    async def _send(self, send: Send, piece: bytes) -> None:
        """Send one piece. uvicorn blocks here while the client's receive window is full."""
        async with write_timeout(self._state.config.limits.stall_seconds):
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    def _record(self, error: Exception) -> None:
        self._state.metrics.errors.labels(f"stream_{error_code(error)}").inc()
        logger.warning("%s: response aborted after it had started: %s", self._id, error)


@asynccontextmanager
async def write_timeout(seconds: float) -> AsyncIterator[None]:
    """Raise SlowReader if the block, which sends to a client, takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise SlowReader(f"the client read nothing for {seconds:g} seconds") from None


async def close_connection(scope: Scope, *, immediately: bool) -> None:
    """Close the connection. `immediately` discards bytes that the client has not read."""
    extension = scope.get("extensions", {}).get(CLOSE_CONNECTION)
    if extension is not None:
        with suppress(TimeoutError):
            await extension["close"](immediately)


def limit_messages(scope: Scope, size: int) -> None:
    """Close the WebSocket with code 1009 at a message of more than `size` bytes, before it has arrived."""
    extension = scope.get("extensions", {}).get(LIMIT_MESSAGES)
    if extension is not None:
        extension["limit"](size)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the connection is lost. Call it only after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(
    http: Request,
    state: ServerState,
    job: SpeechJob,
    *,
    media_type: str | None = None,
    transform: Callable[[SpeechStream], Transform] | None = None,
    words: list[Word] | None = None,
) -> Response:
    """Run a job; return its response when the audio is complete, or for a stream when the first audio is ready.

    Errors before that are raised and become a status code.

    `words` receives the words of a whole response.
    """
    stream = SpeechStream(state, job)
    stream.close_on_disconnect(partial(wait_for_disconnect, http.receive))
    stream.on_generated(partial(release_body, http))
    headers = response_headers(job, state.config)
    if transform is not None:
        del headers["Content-Disposition"]  # events are not a file of audio
    media_type = media_type or job.output.media_type
    with ExitStack() as cleanup:
        cleanup.callback(stream.close)
        if job.show_text:
            headers["X-Spoken-Text"] = await asyncio.to_thread(spoken_text_header, job.request, job.engine)
        if not job.stream:
            audio = await stream.read_all()
            if words is not None:
                words += stream.take_words()
            return Response(audio, media_type=media_type, headers=headers)
        await stream.buffer.wait_for_data()
        cleanup.pop_all()
    transformed = transform(stream) if transform else None
    return SpeechResponse(stream, state, job.id, media_type=media_type, headers=headers, transform=transformed)


async def run_for_client(http: Request, state: ServerState, key: Key, api: str, work: Work[T]) -> T:
    """Run work that is not speech through `run_admitted`, then release the body."""
    try:
        return await run_admitted(state, api, key, request_id(http), work, partial(wait_for_disconnect, http.receive))
    finally:
        release_body(http)
