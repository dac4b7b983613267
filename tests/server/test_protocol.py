"""Connections: upgrades, half-closed clients, messages of WebSockets, and what a refused client writes to the log."""

import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection

from shoal.api.config import Limits
from shoal.api.live.events import MAX_EVENT_BYTES
from shoal.api.state import ServerState
from shoal.server.protocol import MAX_PIPELINED, UNREAD_BYTES, BoundedWebSocket
from shoal.server.routes.static import PAGE
from tests.server.standin import Standin, listening, state_with, wait_until
from tests.websocket import connect

BUDGET = 400_000
CONNECTIONS = 12


@dataclass
class Server:
    state: ServerState
    standin: Standin
    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=240)

    def live(self, **options: Any) -> ClientConnection:
        # A short timeout: after an unfinished message the server reads no close frame.
        return connect(f"ws://127.0.0.1:{self.port}/v1/tts/live", close_timeout=0.1, **options)

    @property
    def used(self) -> int:
        return self.state.body_budget.used


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    standin = Standin(rest=1_600)
    limits = Limits(all_bodies_bytes=BUDGET, body_bytes=150_000, connections=CONNECTIONS)
    state = state_with(standin, limits, tmp_path_factory.mktemp("voices"))
    with listening(state) as port:
        yield Server(state, standin, port)
        standin.go_on.set()


@pytest.fixture(autouse=True)
def nothing_held(server: Server) -> Iterator[None]:
    server.standin.go_on.set()
    yield
    wait_until(lambda: server.used == 0)


def post(text: str, *headers: str, path: str = "/v1/tts", stream: bool = False) -> bytes:
    body = json.dumps({"text": text, "format": "pcm", "streaming": stream})
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode()


def read_all(line: socket.socket) -> bytes:
    received = b""
    while piece := line.recv(1 << 16):
        received += piece
    return received


def unchunked(body: bytes) -> bytes:
    content = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        content, body = content + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return content


H2C = ("Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")


@pytest.mark.parametrize("together", [True, False])
def test_an_upgrade_to_http2_is_ignored_and_the_request_served(server: Server, together: bool) -> None:
    """Java's HttpClient sends this. A body that looks like a request is not served as one."""
    request = post("GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n", *H2C, "Connection: Upgrade, HTTP2-Settings")
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    head, _, body = request.partition(b"\r\n\r\n")
    with server.connect() as line:
        if together:
            line.sendall(request + last)
        else:
            line.sendall(head + b"\r\n\r\n")
            line.sendall(body)
            line.sendall(last)
        answers = read_all(line)
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert server.standin.spoken[-1].startswith("GET /smuggled")
    assert answers.count(b"HTTP/1.1 ") == 2
    assert b'{"status":"ok"' in answers


def test_an_upgrade_with_a_chunked_body_is_served(server: Server) -> None:
    body = b'{"text": "In chunks.", "format": "pcm"}'
    head = (
        "POST /v1/tts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nUpgrade: h2c\r\n"
        "Connection: upgrade, close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with server.connect() as line:
        line.sendall(head.encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert read_all(line).startswith(b"HTTP/1.1 200 ")
    assert server.standin.spoken[-1] == "In chunks."


def test_connect_is_refused(server: Server) -> None:
    with server.connect() as line:
        line.sendall(b"CONNECT evil.example:80 HTTP/1.1\r\nHost: evil.example\r\n\r\nGET /health HTTP/1.1\r\n\r\n")
        answer = read_all(line)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_http_1_0_client_gets_a_response_with_its_length(server: Server, method: str) -> None:
    with server.connect() as line:
        line.sendall(f"{method} / HTTP/1.0\r\n\r\n".encode())
        head, _, body = read_all(line).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % (PAGE / "index.html").stat().st_size in head + b"\r\n"
    assert body == ((PAGE / "index.html").read_bytes() if method == "GET" else b"")


def test_an_http_1_0_client_gets_a_stream_without_chunks(server: Server) -> None:
    """The end of the connection ends the stream; a chunk's length would be heard as samples."""

    def samples(version: str, *headers: str) -> bytes:
        with server.connect() as line:
            line.sendall(post("Hello.", *headers, stream=True).replace(b"HTTP/1.1", version.encode()))
            head, _, body = read_all(line).partition(b"\r\n\r\n")
        assert b"200 OK" in head
        assert (b"transfer-encoding: chunked" in head) == (version == "HTTP/1.1")
        return body

    chunked, plain = samples("HTTP/1.1", "Connection: close"), samples("HTTP/1.0")
    assert unchunked(chunked) == plain


def test_a_client_that_ends_its_sending_side_gets_its_response(server: Server) -> None:
    server.standin.go_on.clear()
    with server.connect() as line:
        line.sendall(post("Half closed."))
        wait_until(lambda: server.state.queue.in_flight == 1)
        line.shutdown(socket.SHUT_WR)
        assert line.recv(100).startswith(b"HTTP/1.1 100 ")
        server.standin.go_on.set()
        assert read_all(line).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_closes_is_noticed(server: Server) -> None:
    server.standin.go_on.clear()
    with server.connect() as line:
        line.sendall(post("Closed."))
        wait_until(lambda: server.state.queue.in_flight == 1)
    wait_until(lambda: server.state.queue.in_flight == 0)
    assert "Closed." not in server.standin.spoken


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_some_pipelined_requests_are_answered_in_order(server: Server) -> None:
    last = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with server.connect() as line:
        line.sendall(post("First.") + HEALTH * (MAX_PIPELINED - 1) + last)
        answers = read_all(line)
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert answers.count(b"HTTP/1.1 200 ") == MAX_PIPELINED + 1
    assert answers.count(b'{"status":"ok"') == MAX_PIPELINED


def test_a_client_that_pipelines_requests_without_limit_is_disconnected(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn would parse and keep all of them, of hundreds of kilobytes with every response."""
    server.standin.go_on.clear()
    with server.connect() as line:
        line.sendall(post("First."))
        wait_until(lambda: server.state.queue.in_flight == 1)
        line.sendall(HEALTH * (MAX_PIPELINED + 1))
        with contextlib.suppress(ConnectionResetError):
            read_all(line)  # returns when the server has closed the connection
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_client_that_closes_with_pipelined_requests_is_noticed(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.standin.go_on.clear()
    with server.connect() as line:
        line.sendall(post("Closed early.") + post("Not begun."))
        wait_until(lambda: "Closed early." in server.standin.begun)
    wait_until(lambda: server.state.queue.in_flight == 0)
    assert "Closed early." not in server.standin.spoken
    assert "Not begun." not in server.standin.begun
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_data_that_is_not_http_ends_a_response_and_is_no_part_of_it(server: Server) -> None:
    server.standin.go_on.clear()
    body = b'{"text": "Cut off.", "format": "pcm", "streaming": true}'
    head = f"POST /v1/tts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with server.connect() as line:
        line.sendall(head.encode() + b"\r\n\r\n" + body)
        received = line.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 200 ")
        line.sendall(b"\xff\xff\r\n\r\n")
        received += read_all(line)
    assert b"HTTP/1.1 4" not in received
    assert not received.endswith(b"0\r\n\r\n")  # so that the client sees that audio is missing
    wait_until(lambda: server.state.queue.in_flight == 0)


def test_messages_are_not_compressed(server: Server) -> None:
    with server.live(compression="deflate") as live:
        assert live.protocol.extensions == []


def finish(live: ClientConnection) -> dict[str, Any]:
    while True:
        event: dict[str, Any] = ormsgpack.unpackb(live.recv(timeout=240))  # type: ignore[arg-type]
        if event["event"] == "finish":
            return event


def test_an_event_after_start_is_small(server: Server) -> None:
    with server.live() as live:
        live.send(ormsgpack.packb({"event": "start", "request": {"text": "", "format": "pcm"}}))
        live.send(ormsgpack.packb({"event": "text", "text": "x" * MAX_EVENT_BYTES}))
        assert "a `text` event has at most 65,536 bytes" in finish(live)["message"]


def test_an_event_of_many_elements_is_not_unpacked(server: Server) -> None:
    with server.live() as live:
        live.send(ormsgpack.packb({"event": "start", "request": {"text": "", "format": "pcm"}}))
        live.send(ormsgpack.packb({"event": "text", "text": [[]] * 11_000}))
        assert "more than 10,000 elements" in finish(live)["message"]


def close_code(live: ClientConnection) -> int | None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            live.recv(timeout=240)
    return live.protocol.close_code


def send_raw(live: ClientConnection, frame: Frame) -> None:
    live.socket.sendall(frame.serialize(mask=True))


def test_unfinished_messages_count_against_the_budget(server: Server) -> None:
    """Fragments, and a frame of which only a part has arrived."""
    part = Frame(Opcode.BINARY, b"x" * 140_000).serialize(mask=True)[:-1]
    with server.live() as first, server.live() as second, server.live() as third:
        send_raw(first, Frame(Opcode.BINARY, b"x" * 140_000, fin=False))
        wait_until(lambda: server.used >= 140_000)
        second.socket.sendall(part)
        wait_until(lambda: server.used >= 280_000)
        third.socket.sendall(part)
        assert close_code(third) == 1013
        assert server.used < BUDGET


def test_fragments_without_data_end_the_socket(server: Server) -> None:
    frame = Frame(Opcode.CONT, b"", fin=False).serialize(mask=True)
    with server.live() as live:
        send_raw(live, Frame(Opcode.BINARY, b"", fin=False))
        live.socket.sendall(frame * 3_000)  # 18 kB; at 128 bytes each, more than twice the largest body
        assert close_code(live) == 1009


def handshake(*headers: str, path: str = "/v1/tts/live") -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", "Connection: Upgrade", "Upgrade: websocket", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


KEY, VERSION = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13"


def test_pings_of_a_client_that_reads_nothing_do_not_fill_the_memory(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets: list[BoundedWebSocket] = []
    made = BoundedWebSocket.connection_made

    def keep(protocol: BoundedWebSocket, transport: Any) -> None:
        made(protocol, transport)
        sockets.append(protocol)

    monkeypatch.setattr(BoundedWebSocket, "connection_made", keep)
    server.standin.go_on.clear()
    ping, pong = Frame(Opcode.PING, b"x" * 125), Frame(Opcode.PONG, b"last").serialize(mask=False)
    start = {"event": "start", "request": {"text": "Hello there. ", "format": "pcm"}}
    with server.connect() as line:
        line.sendall(handshake(KEY, VERSION))
        assert line.recv(1024).startswith(b"HTTP/1.1 101 ")
        for _ in range(120):  # 16 MB, more than the kernel buffers
            line.sendall(ping.serialize(mask=True) * 1_000)
        for event in (start, {"event": "flush"}):
            line.sendall(Frame(Opcode.BINARY, ormsgpack.packb(event)).serialize(mask=True))
        wait_until(lambda: server.state.queue.in_flight == 1)  # the server has read all pings
        assert sockets[0].transport.get_write_buffer_size() < 2 * UNREAD_BYTES
        line.setblocking(False)
        wait_until(lambda: drained(line, sockets[0]))
        line.settimeout(240)
        line.sendall(Frame(Opcode.PING, b"last").serialize(mask=True))
        received = b""
        while not received.endswith(pong):
            received = received[-len(pong) :] + line.recv(1 << 16)


def drained(line: socket.socket, protocol: BoundedWebSocket) -> bool:
    """Read what has arrived; return whether the server has nothing left to send."""
    with contextlib.suppress(BlockingIOError):
        while line.recv(1 << 20):
            pass
    return not protocol.transport.get_write_buffer_size()


REFUSED = [
    handshake(),
    handshake(KEY),
    handshake(KEY, "Sec-WebSocket-Version: 1"),
    handshake("Sec-WebSocket-Key: x", VERSION),
    handshake(KEY, VERSION, path="/v1/nothing"),
    handshake(KEY, VERSION, "Origin: https://evil.example"),
    handshake(KEY, VERSION, path="/v1/text-to-speech/nobody/stream-input"),
    handshake(KEY, VERSION).replace(b"GET", b"POST"),
    b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
]
BROKEN = [
    b"\xff" * 200,
    Frame(Opcode.TEXT, b"\xff\xfe").serialize(mask=True),
    Frame(Opcode.BINARY, b"x").serialize(mask=False),
    Frame(Opcode.CONT, b"x").serialize(mask=True),
    Frame(Opcode.BINARY, b"x" * 200_000).serialize(mask=True),
    Frame(Opcode.TEXT, b"text").serialize(mask=True),
]


def test_refused_clients_write_no_errors_to_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for request in REFUSED:
        with server.connect() as line:
            line.sendall(request)
            assert read_all(line)[:10] in (b"HTTP/1.1 4", b"HTTP/1.1 5"), request
    for frame in BROKEN:
        with server.live() as live:
            live.socket.sendall(frame)
            assert close_code(live) not in (None, 1000)
    with server.connect() as line:
        line.sendall(handshake(KEY, VERSION))  # leaves during the handshake
    found = [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert [record.getMessage() for record in found] == []


def test_sockets_that_wait_for_a_close_frame_do_not_exceed_the_connections(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session ends, but its client sends no close frame. Only the limit of connections closes them here."""
    made = BoundedWebSocket.connection_made

    def patient(protocol: BoundedWebSocket, transport: Any) -> None:
        made(protocol, transport)
        protocol.close_timeout = 3600.0  # uvicorn's is ten seconds

    monkeypatch.setattr(BoundedWebSocket, "connection_made", patient)
    lines = []
    for _ in range(CONNECTIONS + 4):
        line = server.connect()
        lines.append(line)
        line.sendall(handshake(KEY, VERSION))
        assert line.recv(1024).startswith(b"HTTP/1.1 101 ")
        line.sendall(Frame(Opcode.TEXT, b"not MessagePack").serialize(mask=True))
        assert line.recv(1024)  # `finish` and a close frame
    try:
        for line in lines[:4]:
            read_all(line)  # returns when the server has closed the connection
        with server.live() as live:
            live.ping()
    finally:
        for line in lines:
            line.close()


@pytest.mark.parametrize("path", ["/", "/v1/tts/life", "/v1/audio/speech"])
def test_a_socket_of_an_unknown_path_gets_a_404(server: Server, path: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{server.port}{path}")
    answer = refused.value.response
    assert (answer.status_code, "x-request-id" in answer.headers) == (404, True)
    assert b"Not Found" in (answer.body or b"")


def test_a_full_server_refuses_a_socket_with_a_status(tmp_path: Path) -> None:
    state = state_with(Standin(), Limits(connections=0), tmp_path)
    with listening(state) as port, pytest.raises(InvalidStatus, match="503"):
        connect(f"ws://127.0.0.1:{port}/v1/tts/live")
