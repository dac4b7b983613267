"""uvicorn protocols that bound what a client can hold open or buffer before the application sees the request."""

import asyncio
import select
import struct
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypedDict

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from shoal.api.admission import BodyBudget, BodyReservation
from shoal.api.config import Limits
from shoal.errors import EngineBusy
from shoal.server.streaming_response import CLOSE_CONNECTION, LIMIT_MESSAGES

if sys.platform != "win32":
    import fcntl
    import termios

# Longer than load balancers keep idle connections (AWS and nginx 60 s, Google 600 s): otherwise they send requests on
# connections that the server is closing, and answer 502. `connections` bounds the number of idle ones.
KEEP_ALIVE_SECONDS = 620
CLOSING_SECONDS = 5.0
CHECKS = 4  # checks per stall timeout
UNREAD_BYTES = 1 << 20  # unsent bytes of a WebSocket above which pings are not answered
FRAGMENT_OVERHEAD_BYTES = 128  # memory that a fragment of a WebSocket message needs besides its data
HANG_UP_CHECK_SECONDS = 0.1
UPGRADES = (b"upgrade", b"http2-settings")  # headers, and options of the Connection header
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
MAX_PIPELINED = 16  # requests that may wait for the response to an earlier request of their connection


class HeadersTooLarge(Exception):
    """The request headers exceed the limit."""


class TooManyPipelined(Exception):
    """The client sends requests faster than they are answered."""


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
        """Stop permanently: a lost transport has no buffer to query."""
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
        # The kernel accepts data in large steps; between them, a slow client's reads only shrink the kernel's buffer.
        return self._transport.get_write_buffer_size() + kernel_send_bytes(self._transport)

    def _schedule(self) -> None:
        if self._transport.get_write_buffer_size():
            self._next = self._loop.call_later(self._seconds / CHECKS, self._check)


async def close_transport(transport: asyncio.Transport, lost: asyncio.Event, immediately: bool) -> None:
    """Close the transport and wait: uvicorn logs an error if the app returns while its response is open."""
    if immediately:
        transport.abort()
    else:
        transport.close()
        asyncio.get_running_loop().call_later(CLOSING_SECONDS, transport.abort)
    async with asyncio.timeout(CLOSING_SECONDS + 1.0):
        await lost.wait()


def has_hung_up(transport: asyncio.Transport) -> bool:
    """Return whether the connection was reset. A half-closed connection (client sent FIN) does not count."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    return bool(poll.poll(0))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket with a stall timeout, which also applies after the application has finished.

    Messages count against the body budget from their first byte until the application receives them.
    """

    limits = Limits()
    budget = BodyBudget(limits.all_bodies_bytes)
    idle: "dict[BoundedProtocol | BoundedWebSocket, None]"
    _done = False
    _fragment_bytes = 0  # memory held by the fragments of an unfinished message

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._message_bytes = self.limits.body_bytes  # size of the largest message; a route may lower it
        self._queued = deque[int]()  # sizes of the messages that the application has not received
        self._reservation = BodyReservation(self.budget)
        self._lost = asyncio.Event()
        self._watchdog = StallWatchdog(transport, self.limits.stall_seconds, self._is_writing)
        self._watchdog.start()  # a response from before the upgrade may be unsent

    def connection_lost(self, exc: Exception | None) -> None:
        self._watchdog.stop()
        self._reservation.release()
        self.idle.pop(self, None)
        super().connection_lost(exc)
        self._lost.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._reserve()

    def handle_text(self, event: Frame) -> None:
        self._add_fragment(event)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._add_fragment(event)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        self._add_fragment(event)
        super().handle_cont(event)

    def handle_ping(self) -> None:
        if self.transport.get_write_buffer_size() > UNREAD_BYTES:
            self.conn.data_to_send()  # drops the answer: a client that only sends pings would fill the memory
        else:
            super().handle_ping()

    def send_receive_event_to_app(self) -> None:
        if not self.close_sent:  # otherwise the message is discarded
            self._queued.append(self._fragment_bytes)
        self._fragment_bytes = 0
        if self.curr_msg_data_type == "text" and not _is_utf8(b"".join(self.frames)):
            self._fail(CloseCode.INVALID_DATA, "a text message must be UTF-8")  # uvicorn would log a traceback
        else:
            super().send_receive_event_to_app()

    async def receive(self) -> Any:
        message = await super().receive()
        if message["type"] == "websocket.receive":
            self._queued.popleft()
            self._reserve()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        # uvicorn would log a rejected handshake as an error of the application.
        self.handshake_complete = self.handshake_complete or self.close_sent

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # otherwise the handshake failed, and no application runs
            self.scope["extensions"] |= {
                CLOSE_CONNECTION: {"close": self._close},
                LIMIT_MESSAGES: {"limit": self._limit_messages},
            }

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self._done = True
        self._watchdog.start()
        if not self.disconnected:
            self.idle[self] = None  # idle: only waits for the client's close frame

    def _is_writing(self) -> bool:
        return self.writable.is_set() and not self._done

    def _add_fragment(self, event: Frame) -> None:
        self._fragment_bytes += len(event.data) + FRAGMENT_OVERHEAD_BYTES

    def _reserve(self) -> None:
        """Count what this socket holds against the budget, or close it when that exceeds a limit."""
        if self.close_sent or self.disconnected:
            return
        if self._fragment_bytes > 2 * self._message_bytes:
            self._fail(CloseCode.MESSAGE_TOO_BIG, "the message has too many fragments")
            return
        # Only a frame that began before the route lowered the limit gets here; later ones are rejected by their header.
        if len(self.conn.reader.buffer) > self._message_bytes:
            self._fail(CloseCode.MESSAGE_TOO_BIG, f"a message has at most {self._message_bytes:,} bytes")
            return
        try:
            self._reservation.resize(len(self.conn.reader.buffer) + self._fragment_bytes + sum(self._queued))
        except EngineBusy as error:
            self._fail(CloseCode.TRY_AGAIN_LATER, str(error))

    def _limit_messages(self, size: int) -> None:
        self._message_bytes = self.conn.max_message_size = min(size, self._message_bytes)

    def _fail(self, code: CloseCode, reason: str) -> None:
        self.frames, self._fragment_bytes = [], 0
        self.conn.fail(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()

    async def _close(self, immediately: bool) -> None:
        await close_transport(self.transport, self._lost, immediately)


def send_until_close(cycle: RequestResponseCycle) -> None:
    """Send a body of unknown length without chunks: HTTP/1.0 has none, the end of the connection ends the body."""
    send, has_length = cycle.send, False

    async def send_plain(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on headers, pipelined requests, idle connections and stalled clients.

    Upgrades to protocols other than WebSocket are ignored. A client that half-closes still gets its response.
    """

    limits = Limits()
    websocket = BoundedWebSocket
    # All connections without a request, closing ones included, longest idle first.
    idle: "dict[BoundedProtocol | BoundedWebSocket, None]"
    _hang_up_check: asyncio.TimerHandle | None = None
    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0  # raw bytes of the request head
    _header_bytes = 0  # parsed header names and values
    _in_head = True
    _lost: asyncio.Event
    _watchdog: StallWatchdog

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._lost = asyncio.Event()
        self._unanswered = deque[RequestResponseCycle]()  # the request that is served, then the pipelined ones
        self._watchdog = StallWatchdog(transport, self.limits.stall_seconds, self._is_writing)
        self._evict_idle()
        self.idle[self] = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watchdog.stop()
        self._cancel_deadline()
        if self._hang_up_check is not None:
            self._hang_up_check.cancel()
        self.idle.pop(self, None)
        super().connection_lost(exc)
        # uvicorn informs only the newest request. If that was pipelined, another one is being served.
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._lost.set()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Return True to keep a half-closed connection while its response is in progress, None to close it."""
        if not self._can_detect_hang_up() or self.cycle.more_body or self.cycle.response_complete:
            return None
        self.cycle.keep_alive = False
        if not self.cycle.response_started and not self.pipeline:
            # A client that has closed the connection completely, not only half, answers this with a reset.
            self.transport.write(CONTINUE)
        self._check_hang_up()
        return True

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
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
        if self._ignores_upgrade():
            return
        self._in_head = False
        self._cancel_deadline()
        self.idle.pop(self, None)
        if len(self.pipeline) >= MAX_PIPELINED:
            # uvicorn keeps them in memory, and reads more after every response. An error response is not possible: the
            # client would take it for the response to an earlier request.
            self.transport.abort()
            raise TooManyPipelined
        newest = self.cycle
        super().on_headers_complete()
        if self.cycle is not newest:  # no upgrade to a WebSocket
            self._unanswered.append(self.cycle)
            if self.scope["http_version"] == "1.0":
                send_until_close(self.cycle)

    def on_message_complete(self) -> None:
        if not self._ignores_upgrade():
            super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._watchdog.stop()  # the WebSocket has its own
        self.ws_protocol_class = self.websocket
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        # The response may still be in the transport's buffer, and no application waits for it to be sent.
        self._watchdog.start()
        # False if a pipelined request is already being served.
        if self.cycle.response_complete:
            self.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        if self._header_bytes > self.limits.header_bytes:
            self._reject(431)
        elif self._is_responding():
            self.transport.close()
        elif not self.transport.is_closing():
            super().send_400_response(msg)

    def _ignores_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade()) and not self._should_upgrade()

    def _upgrade(self, rest: bytes) -> None:
        """Continue after a head that asks for an upgrade; `rest` follows the head."""
        if self._should_upgrade():
            self.handle_websocket_upgrade()
        elif self.parser.get_method() == b"CONNECT":
            self.send_400_response("CONNECT is not supported.")
        else:
            # The parser treats the head as the whole request and the body as the next one, so a new parser gets the
            # head without the upgrade.
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._head_bytes = self._header_bytes = 0
            self.data_received(head + rest)

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(option for option in value.split(b",") if option.strip().lower() not in UPGRADES)
            if name not in UPGRADES:
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _can_detect_hang_up(self) -> bool:
        # On other systems poll() does not distinguish a half-closed connection from a closed one.
        return sys.platform == "linux" and self.cycle is not None and self.scope["http_version"] == "1.1"

    def _check_hang_up(self) -> None:
        if self.transport.is_closing():
            return
        if has_hung_up(self.transport):
            self.transport.abort()
        else:
            self._hang_up_check = self.loop.call_later(HANG_UP_CHECK_SECONDS, self._check_hang_up)

    def _evict_idle(self) -> None:
        """Close the longest idle connection at the limit. ConnectionLimit bounds requests; this bounds idle ones."""
        if len(self.connections) > self.limits.connections and self.idle:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            # With unsent data, close() would keep the connection until the client has read it.
            unsent = oldest.transport.get_write_buffer_size()
            oldest.transport.abort() if unsent or oldest.transport.is_closing() else oldest.transport.close()

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
        """Close the connection, with an empty response of this status unless another one is in progress."""
        if not self.transport.is_closing():
            if not self._is_responding():
                self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def _is_responding(self) -> bool:
        """Return whether a response is in progress: the client would read an error response as a part of it."""
        return bool(self._unanswered) and self._unanswered[0].response_started

    async def _close(self, immediately: bool) -> None:
        await close_transport(self.transport, self._lost, immediately)


def bounded_protocol(limits: Limits, budget: BodyBudget) -> type[BoundedProtocol]:
    """Return a protocol class with these limits; uvicorn instantiates it once per connection."""
    idle: dict[BoundedProtocol | BoundedWebSocket, None] = {}
    shared = {"limits": limits, "idle": idle}
    websocket = type("BoundedWebSocket", (BoundedWebSocket,), {**shared, "budget": budget})
    return type("BoundedProtocol", (BoundedProtocol,), {**shared, "websocket": websocket})


class ProtocolOptions(TypedDict):
    http: type[asyncio.Protocol]
    ws: Literal["websockets-sansio"]
    ws_max_size: int
    ws_per_message_deflate: bool
    timeout_keep_alive: int


def protocol_options(limits: Limits, budget: BodyBudget) -> ProtocolOptions:
    """Return the arguments of uvicorn.Config that bound connections.

    Compression is off: a few kilobytes would inflate to a message of the maximum size, and audio hardly compresses.
    """
    return {
        "http": bounded_protocol(limits, budget),
        "ws": "websockets-sansio",
        "ws_max_size": limits.body_bytes,
        "ws_per_message_deflate": False,
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
    }
