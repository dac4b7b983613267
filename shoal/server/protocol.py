"""uvicorn's HTTP protocol with an end to everything a client can drag out or pile up before the app hears of it."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from shoal.server.config import Limits
from shoal.server.streaming import HANG_UP

CLOSING_SECONDS = 5.0


class TooManyHeaders(Exception):
    """The headers are larger than they may be."""


class BoundedProtocol(HttpToolsProtocol):
    limits = Limits()
    idle: "dict[BoundedProtocol, None]"  # connections without a request, of all, the one that waits longest first
    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0  # as they came
    _header_bytes = 0  # as they were read
    _in_head = True
    _lost: asyncio.Event

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._lost = asyncio.Event()
        self._make_room()
        self.idle[self] = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        self.idle.pop(self, None)
        super().connection_lost(exc)
        self._lost.set()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # Also a single header that never ends, of which the parser says nothing.
        if self._in_head and self._head_bytes > self.limits.header_bytes and not self.transport.is_closing():
            self._refuse(431)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: {"end": self._hang_up}}
        if not self._in_head:
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self.limits.header_bytes:
            raise TooManyHeaders

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._forget_deadline()
        self.idle.pop(self, None)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Otherwise one that came behind it is being answered now.
        if self.cycle.response_complete and not self.transport.is_closing():
            self.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        if self._header_bytes > self.limits.header_bytes:
            self._refuse(431)
        else:
            super().send_400_response(msg)

    def _make_room(self) -> None:
        """The app bounds requests; connections that make none give way to new ones, so that these are bounded, too."""
        if len(self.connections) > self.limits.connections and self.idle:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.transport.close()

    def _expect_head(self) -> None:
        self._in_head, self._head_bytes, self._header_bytes = True, 0, 0
        self._forget_deadline()
        self._deadline = self.loop.call_later(self.limits.header_seconds, self._refuse, 408)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int) -> None:
        if not self.transport.is_closing():
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    async def _hang_up(self, at_once: bool) -> None:
        """Close, and wait until it is: an app that returned earlier would be called faulty."""
        if at_once:
            self.transport.abort()
        else:
            self.transport.close()
            self.loop.call_later(CLOSING_SECONDS, self.transport.abort)
        async with asyncio.timeout(CLOSING_SECONDS + 1.0):
            await self._lost.wait()


def bounded_protocol(limits: Limits) -> type[BoundedProtocol]:
    """The protocol class for these limits; uvicorn makes one object of it per connection."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits, "idle": {}})
