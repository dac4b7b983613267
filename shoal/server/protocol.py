"""uvicorn's protocols with an end to everything a client can drag out or pile up before the app hears of it."""

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
from shoal.server.streaming_response import HANG_UP

if sys.platform != "win32":
    import fcntl
    import termios

CLOSING_SECONDS = 5.0
LOOKS = 4  # at what is unsent, in the time in which some of it must have been taken


class TooManyHeaders(Exception):
    """The headers are larger than they may be."""


def in_kernel(transport: asyncio.Transport) -> int:
    """Bytes that the kernel has taken and the client has not; 0 where that cannot be known."""
    if sys.platform != "win32":
        with suppress(OSError):
            answer = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            return int(struct.unpack("i", answer)[0])
    return 0


class Watch:
    """Ends a connection when nobody takes what was written to it: to close it would wait for that without end."""

    def __init__(self, transport: asyncio.Transport, seconds: float, is_written_to: Callable[[], bool]) -> None:
        self._transport, self._seconds, self._is_written_to = transport, seconds, is_written_to
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.TimerHandle | None = None
        self._lost = False

    def begin(self) -> None:
        """Until all is taken. One that goes on already keeps its time."""
        if self._next is None and not self._lost:
            self._untaken, self._taken_at = self._count(), self._loop.time()
            self._look_again()

    def end(self) -> None:
        """For good: a lost transport cannot be asked."""
        self._lost = True
        if self._next is not None:
            self._next.cancel()

    def _look(self) -> None:
        self._next = None
        before, self._untaken = self._untaken, self._count()
        # While more is written a reader who takes some cannot be told from one who takes nothing.
        if self._untaken < before or self._is_written_to():
            self._taken_at = self._loop.time()
        if self._loop.time() - self._taken_at >= self._seconds:
            self._transport.abort()
        else:
            self._look_again()

    def _count(self) -> int:
        # The kernel asks for more only when it has room for much: a slow reader would seem to take nothing meanwhile.
        return self._transport.get_write_buffer_size() + in_kernel(self._transport)

    def _look_again(self) -> None:
        if self._transport.get_write_buffer_size():
            self._next = self._loop.call_later(self._seconds / LOOKS, self._look)


async def hang_up(transport: asyncio.Transport, lost: asyncio.Event, at_once: bool) -> None:
    """Close, and wait until it is: an app that returned earlier would be called faulty."""
    if at_once:
        transport.abort()
    else:
        transport.close()
        asyncio.get_running_loop().call_later(CLOSING_SECONDS, transport.abort)
    async with asyncio.timeout(CLOSING_SECONDS + 1.0):
        await lost.wait()


class BoundedSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, which can be hung up, and does not wait for a reader when the app is done."""

    limits = Limits()
    _done = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._lost = asyncio.Event()
        self._watch = Watch(transport, self.limits.stall_seconds, self._is_written_to)
        self._watch.begin()  # there may be an answer from before the upgrade

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.end()
        super().connection_lost(exc)
        self._lost.set()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # else it was refused, and there is no app to tell
            self.scope["extensions"][HANG_UP] = {"end": self._hang_up}

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self._done = True
        self._watch.begin()

    def _is_written_to(self) -> bool:
        return self.writable.is_set() and not self._done

    async def _hang_up(self, at_once: bool) -> None:
        await hang_up(self.transport, self._lost, at_once)


class BoundedProtocol(HttpToolsProtocol):
    limits = Limits()
    socket = BoundedSocket
    idle: "dict[BoundedProtocol, None]"  # connections without a request, of all, the one that waits longest first
    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0  # as they came
    _header_bytes = 0  # as they were read
    _in_head = True
    _lost: asyncio.Event
    _watch: Watch

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._lost = asyncio.Event()
        self._watch = Watch(transport, self.limits.stall_seconds, self._is_written_to)
        self._make_room()
        self.idle[self] = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.end()
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

    def handle_websocket_upgrade(self) -> None:
        self._watch.end()  # the socket has its own
        self.ws_protocol_class = self.socket
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A whole answer is only in the transport's buffer yet, and no app waits for it to leave.
        self._watch.begin()
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
            # Closing would keep it for as long as its last answer is not read.
            oldest.transport.abort() if oldest.transport.get_write_buffer_size() else oldest.transport.close()

    def _is_written_to(self) -> bool:
        return not (self.cycle.response_complete or self.flow.write_paused)

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
        await hang_up(self.transport, self._lost, at_once)


def bounded_protocol(limits: Limits) -> type[BoundedProtocol]:
    """The protocol class for these limits; uvicorn makes one object of it per connection."""
    socket = type("BoundedSocket", (BoundedSocket,), {"limits": limits})
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits, "idle": {}, "socket": socket})
