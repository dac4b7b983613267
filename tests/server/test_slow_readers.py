"""Clients that do not read are disconnected, for every kind of response and whichever side closes."""

import base64
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ormsgpack
from websockets.frames import Frame, Opcode

from shoal.api.config import Limits
from tests.server.standin import RATE, Standin, listening, state_with
from tests.waiting import wait_until

MUCH = 600 * RATE  # samples: far more than the kernel buffers


@contextlib.contextmanager
def slow_line(port: int) -> Iterator[socket.socket]:
    with contextlib.closing(socket.socket()) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(240)
        line.connect(("127.0.0.1", port))
        yield line


def talker() -> Standin:
    standin = Standin(rest=MUCH)
    standin.go_on.set()
    return standin


def ask_for_a_whole_answer(line: socket.socket) -> None:
    body = json.dumps({"text": "Hi.", "format": "wav", "streaming": False}).encode()
    head = "POST /v1/tts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    line.sendall(head.format(len(body)).encode() + body)
    assert line.recv(15) == b"HTTP/1.1 200 OK"


def is_connected(line: socket.socket) -> bool:
    """Return whether the server still has the connection open, without reading from it."""
    name = f":{line.getsockname()[1]:04X}"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()]
    return any(row[2].endswith(name) and row[3] == "01" for row in rows)


def test_a_whole_response_that_is_not_read_is_aborted(tmp_path: Path) -> None:
    state = state_with(talker(), Limits(stall_seconds=0.3), tmp_path)
    with listening(state) as port, slow_line(port) as line:
        ask_for_a_whole_answer(line)
        assert is_connected(line)
        wait_until(lambda: not is_connected(line))


def test_pipelined_requests_do_not_keep_a_stalled_connection_open(tmp_path: Path) -> None:
    """The next response waits behind the stalled one."""
    state = state_with(talker(), Limits(stall_seconds=0.3), tmp_path)
    with listening(state) as port, slow_line(port) as line:
        ask_for_a_whole_answer(line)
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: not is_connected(line))


def test_a_slowly_read_response_is_sent_completely(tmp_path: Path) -> None:
    """Even if the client reads so little that the kernel accepts nothing new for longer than the stall timeout."""
    state = state_with(talker(), Limits(stall_seconds=1.0), tmp_path)
    with listening(state) as port, slow_line(port) as line:
        ask_for_a_whole_answer(line)
        received, hurries_at = 0, time.monotonic() + 4.0
        while received < 2 * MUCH:
            time.sleep(0.01 if time.monotonic() < hurries_at else 0.0)
            received += len(piece := line.recv(32 << 10))
            assert piece


def test_a_stalled_connection_is_evicted_for_a_new_one(tmp_path: Path) -> None:
    state = state_with(talker(), Limits(connections=1), tmp_path)
    with listening(state) as port, slow_line(port) as line:
        ask_for_a_whole_answer(line)
        with slow_line(port):
            wait_until(lambda: not is_connected(line))


def frame(**event: Any) -> bytes:
    return Frame(Opcode.BINARY, ormsgpack.packb(event)).serialize(mask=True)


def ask_for_a_live_session(line: socket.socket) -> None:
    upgrade = (
        b"GET /v1/tts/live HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + base64.b64encode(bytes(16)) + b"\r\n\r\n"
    )
    line.sendall(upgrade)
    assert line.recv(12) == b"HTTP/1.1 101"
    line.sendall(frame(event="start", request={"text": "Hello there.", "format": "wav"}) + frame(event="flush"))


def test_a_live_session_that_is_not_read_is_closed(tmp_path: Path) -> None:
    state = state_with(talker(), Limits(stall_seconds=0.3), tmp_path)
    with listening(state) as port, slow_line(port) as line:
        ask_for_a_live_session(line)
        wait_until(lambda: state.queue.in_flight == 1)
        wait_until(lambda: not is_connected(line))
        wait_until(lambda: state.queue.in_flight == 0)
