"""uvicorn protocols that bound what a client can hold open or buffer before the application sees the request."""

import asyncio
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

from shoal.api.config import Limits
from shoal.server.streaming_response import CLOSE_CONNECTION

if sys.platform != "win32":
    import fcntl
    import termios

CLOSING_SECONDS = 5.0
CHECKS = 4  # per stall timeout


class HeadersTooLarge(Exception):
    """The request headers exceed the limit."""


def kernel_send_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes in the kernel's send buffer that the client has not acknowledged; 0 if unknown."""
    if sys.platform != "win32":
        with suppress(OSError):
            queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            return int(struct.unpack("i", queued)[0])
    return 0


class StallWatchdog:
    """Aborts a connection whose client reads nothing for `seconds`: closing it would wait for the client forever."""

    def __init__(self, transport: asyncio.Transport, seconds: float, is_writing: Callable[[], bool]) -> None:
        self._transport, self._seconds, self._is_writing = transport, seconds, is_writing
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.TimerHandle | None = None
        self._stopped = False

    def start(self) -> None:
        """Watch until all bytes are sent. A running watchdog keeps its timer."""
        if self._next is None and not self._stopped:
            self._unsent, self._progress_at = self._count(), self._loop.time()
            self._schedule()

    def stop(self) -> None:
        """Stop for good: a lost transport has no buffer to query."""
        self._stopped = True
        if self._next is not None:
            self._next.cancel()

    def _check(self) -> None:
        self._next = None
        before, self._unsent = self._unsent, self._count()
        # While the application keeps writing, the buffer may not shrink although the client reads.
        if self._unsent < before or self._is_writing():
            self._progress_at = self._loop.time()
        if self._loop.time() - self._progress_at >= self._seconds:
            self._transport.abort()
        else:
            self._schedule()

    def _count(self) -> int:
        # The kernel takes new data only in large steps, between which a slow client's reads show only in its buffer.
        return self._transport.get_write_buffer_size() + kernel_send_bytes(self._transport)

    def _schedule(self) -> None:
        if self._transport.get_write_buffer_size():
            self._next = self._loop.call_later(self._seconds / CHECKS, self._check)


async def close_transport(transport: asyncio.Transport, lost: asyncio.Event, immediately: bool) -> None:
    """Close, and wait until it is closed: uvicorn logs an error for an app that returns with an open response."""
    if immediately:
        transport.abort()
    else:
        transport.close()
        asyncio.get_running_loop().call_later(CLOSING_SECONDS, transport.abort)
    async with asyncio.timeout(CLOSING_SECONDS + 1.0):
        await lost.wait()


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket with a stall timeout, which also applies after the application has finished."""

    limits = Limits()
    _done = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._lost = asyncio.Event()
        self._watchdog = StallWatchdog(transport, self.limits.stall_seconds, self._is_writing)
        self._watchdog.start()  # a response from before the upgrade may be unsent

    def connection_lost(self, exc: Exception | None) -> None:
        self._watchdog.stop()
        super().connection_lost(exc)
        self._lost.set()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # otherwise the handshake failed, and no application runs
            self.scope["extensions"][CLOSE_CONNECTION] = {"close": self._close}

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self._done = True
        self._watchdog.start()

    def _is_writing(self) -> bool:
        return self.writable.is_set() and not self._done

    async def _close(self, immediately: bool) -> None:
        await close_transport(self.transport, self._lost, immediately)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on headers, idle connections and stalled clients."""

    limits = Limits()
    websocket = BoundedWebSocket
    idle: "dict[BoundedProtocol, None]"  # all connections without a request, longest idle first
    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0  # raw bytes of the request head
    _header_bytes = 0  # parsed header names and values
    _in_head = True
    _lost: asyncio.Event
    _watchdog: StallWatchdog

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._lost = asyncio.Event()
        self._watchdog = StallWatchdog(transport, self.limits.stall_seconds, self._is_writing)
        self._evict_idle()
        self.idle[self] = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watchdog.stop()
        self._cancel_deadline()
        self.idle.pop(self, None)
        super().connection_lost(exc)
        self._lost.set()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # Catches a single endless header too, which the parser does not report.
        if self._in_head and self._head_bytes > self.limits.header_bytes and not self.transport.is_closing():
            self._reject(431)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CLOSE_CONNECTION: {"close": self._close}}
        if not self._in_head:
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self.limits.header_bytes:
            raise HeadersTooLarge

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._cancel_deadline()
        self.idle.pop(self, None)
        super().on_headers_complete()

    def handle_websocket_upgrade(self) -> None:
        self._watchdog.stop()  # the WebSocket has its own
        self.ws_protocol_class = self.websocket
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The response may still be in the transport's buffer, and no application waits for it to be sent.
        self._watchdog.start()
        # Otherwise a pipelined request is being served now.
        if self.cycle.response_complete and not self.transport.is_closing():
            self.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        if self._header_bytes > self.limits.header_bytes:
            self._reject(431)
        else:
            super().send_400_response(msg)

    def _evict_idle(self) -> None:
        """Close the longest idle connection at the limit. ConnectionLimit bounds requests; this bounds idle ones."""
        if len(self.connections) > self.limits.connections and self.idle:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            # close() would keep the connection until its last response is read.
            oldest.transport.abort() if oldest.transport.get_write_buffer_size() else oldest.transport.close()

    def _is_writing(self) -> bool:
        return not (self.cycle.response_complete or self.flow.write_paused)

    def _expect_head(self) -> None:
        self._in_head, self._head_bytes, self._header_bytes = True, 0, 0
        self._cancel_deadline()
        self._deadline = self.loop.call_later(self.limits.header_seconds, self._reject, 408)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _reject(self, status: int) -> None:
        if not self.transport.is_closing():
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    async def _close(self, immediately: bool) -> None:
        await close_transport(self.transport, self._lost, immediately)


def bounded_protocol(limits: Limits) -> type[BoundedProtocol]:
    """Return a protocol class with these limits; uvicorn instantiates it once per connection."""
    websocket = type("BoundedWebSocket", (BoundedWebSocket,), {"limits": limits})
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits, "idle": {}, "websocket": websocket})
