"""A response whose bytes are still being made.

Once it has begun there is no status left to tell of an error: the connection is closed before its proper end, which
every HTTP client notices, and the log and the metrics have the reason under the request's id.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from shoal.api.exceptions import SlowReader
from shoal.api.speech_stream import Order, Performance
from shoal.server.error_responses import kind_of
from shoal.server.parsing import let_go
from shoal.server.state import Desk

logger = logging.getLogger(__name__)

HANG_UP = "shoal.hang_up"

Dress = Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]


class SpeechResponse(Response):
    """`dress` puts the pieces of audio into another form, such as server-sent events."""

    def __init__(
        self,
        performance: Performance,
        desk: Desk,
        request_id: str,
        *,
        media_type: str,
        headers: dict[str, str],
        dress: Dress | None = None,
    ) -> None:
        self._performance, self._desk, self._id = performance, desk, request_id
        self._dress = dress or (lambda pieces: pieces)
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers(headers)
        # The length is not known, and an empty body has none to state.
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece in self._dress(self._performance.pipe.pieces()):
                await self._send(send, piece)
            await send({"type": "http.response.body", "body": b""})
        except (ClientDisconnect, OSError):
            pass  # counted by the tally; nobody is left to tell
        except Exception as error:  # noqa: BLE001 - the edge: a stream has no other way to say that it failed
            self._count(error)
            await hang_up(scope, at_once=isinstance(error, SlowReader))
        finally:
            self._performance.close()

    async def _send(self, send: Send, piece: bytes) -> None:
        """uvicorn waits here while the client's window is full."""
        stall = self._desk.config.limits.stall_seconds
        try:
            async with asyncio.timeout(stall):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError:
            raise SlowReader(f"the reader took nothing for {stall:g} seconds") from None

    def _count(self, error: Exception) -> None:
        self._desk.metrics.errors.labels(f"stream_{kind_of(error)}").inc()
        logger.warning("%s broke off after its first bytes: %s", self._id, error)


async def hang_up(scope: Scope, *, at_once: bool) -> None:
    """End a connection. `at_once` does not wait for bytes that nobody takes."""
    extension = scope.get("extensions", {}).get(HANG_UP)
    if extension is not None:
        with suppress(TimeoutError):
            await extension["end"](at_once)


async def perform(
    http: Request,
    desk: Desk,
    order: Order,
    headers: dict[str, str],
    *,
    media_type: str | None = None,
    dress: Callable[[Performance], Dress] | None = None,
) -> Response:
    """The answer to a request whose body has been read: whole, or from its first bytes on."""
    performance = Performance(desk, order)
    performance.end_when_gone(http.receive)
    performance.when_made(lambda: let_go(http))
    media_type = media_type or order.rendering.media_type
    try:
        if order.stream:
            await performance.pipe.started()
            dressed = dress(performance) if dress else None
            return SpeechResponse(performance, desk, order.id, media_type=media_type, headers=headers, dress=dressed)
        content = await performance.whole()
    except BaseException:
        performance.close()
        raise
    performance.close()
    return Response(content, media_type=media_type, headers=headers)
