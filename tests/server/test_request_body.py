"""The body budget bounds all bodies together for as long as they are held."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ormsgpack
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from shoal.api.config import Limits
from shoal.api.state import ServerState
from tests.server.standin import RATE, Standin, listening, state_with
from tests.waiting import wait_until
from tests.websocket import connect

PACKED = {"content-type": "application/msgpack"}
REFERENCES = [{"audio": b"\0" * 60_000, "text": "What I say."}]
BUSY = "too many uploads are in flight; try again later"


@dataclass
class RunningServer:
    """A server whose body budget holds the recordings of one request."""

    state: ServerState
    standin: Standin
    port: int

    def post(self, path: str, content: dict[str, Any]) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.post(
            url, content=ormsgpack.packb(content), headers=PACKED, timeout=240, trust_env=False, verify=False
        )

    def live(self) -> ClientConnection:
        return connect(f"ws://127.0.0.1:{self.port}/v1/tts/live")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    standin = Standin()
    state = state_with(standin, Limits(all_bodies_bytes=100_000), tmp_path)
    with listening(state) as port:
        yield RunningServer(state, standin, port)
        standin.go_on.set()


SPEECH = {"text": "Hello.", "references": REFERENCES, "streaming": True, "format": "pcm"}


def begin(running: RunningServer, content: dict[str, Any]) -> socket.socket:
    """Send a request and read the first bytes of its response."""
    body = ormsgpack.packb(content)
    head = (
        "POST /v1/tts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    line = socket.create_connection(("127.0.0.1", running.port), timeout=240)
    line.sendall(head.encode() + body)
    assert b" 200 " in line.recv(4096)
    return line


def test_a_request_holds_its_reservation_until_it_is_generated(running: RunningServer) -> None:
    with begin(running, SPEECH):
        refused = running.post("/v1/tts", SPEECH)
        assert (refused.status_code, refused.json()["message"]) == (429, BUSY)
        assert "retry-after" in refused.headers
        running.standin.go_on.set()
        wait_until(lambda: running.state.body_budget.used == 0)
    assert running.post("/v1/tts", SPEECH).status_code == 200


def test_a_client_that_reads_nothing_holds_no_reservation(running: RunningServer) -> None:
    running.standin.rest = 200 * RATE  # more than the kernel buffers
    running.standin.go_on.set()
    with begin(running, SPEECH):
        wait_until(lambda: running.state.body_budget.used == 0)
        assert running.post("/v1/tts", SPEECH | {"streaming": False}).status_code == 200


@pytest.mark.parametrize("content", [{"text": "Hello.", "colour": "blue" * 9_000}, {"text": "x" * 50_000}])
def test_a_rejected_request_releases_its_reservation(running: RunningServer, content: dict[str, Any]) -> None:
    assert running.post("/v1/tts", content).status_code in (400, 422)
    wait_until(lambda: running.state.body_budget.used == 0)


def test_recordings_hold_their_reservation_while_they_are_encoded(running: RunningServer) -> None:
    audios = {"audios": [each["audio"] for each in REFERENCES]}
    with begin(running, SPEECH):
        assert running.post("/v1/vqgan/encode", audios).status_code == 429
        running.standin.go_on.set()
        wait_until(lambda: running.state.body_budget.used == 0)
    assert running.post("/v1/vqgan/encode", audios).status_code == 200
    wait_until(lambda: running.state.body_budget.used == 0)


def start(line: ClientConnection) -> None:
    request = {"text": "", "format": "pcm", "references": REFERENCES}
    line.send(ormsgpack.packb({"event": "start", "request": request}))


def test_a_live_session_holds_its_reservation_until_it_ends(running: RunningServer) -> None:
    with running.live() as first:
        start(first)
        wait_until(lambda: running.state.body_budget.used > 60_000)
        with running.live() as second:
            start(second)
            with pytest.raises(ConnectionClosed) as closed:
                second.recv(timeout=240)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, BUSY)
        assert running.post("/v1/tts", SPEECH).status_code == 429
    wait_until(lambda: running.state.body_budget.used == 0)
    with running.live() as third:
        start(third)
        third.send(ormsgpack.packb({"event": "stop"}))
        assert ormsgpack.unpackb(third.recv(timeout=240))["reason"] == "stop"  # type: ignore[arg-type]
