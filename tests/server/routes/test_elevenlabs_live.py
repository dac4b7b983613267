"""ElevenLabs' WebSockets over an engine under the test's control."""

import base64
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from socket import create_connection
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from shoal.api.config import KeyLimits, Limits, ServerConfig
from shoal.api.engine_client import EngineHandle, EngineLifecycle
from shoal.api.live.events import MAX_EVENT_BYTES
from shoal.api.state import ServerState, create_state
from shoal.server.routes.elevenlabs.live import MAX_MESSAGE_BYTES
from shoal.voices.store import VoiceStore
from tests.server.standin import RATE, Standin, listening, state_with, wait_until
from tests.websocket import connect

FIRST, WHOLE = 2 * RATE // 10, 2 * (RATE + RATE // 10)  # bytes of the first chunk, and of a whole text
KEY = "a-key-of-the-tests"
MULTI = "multi-stream-input?output_format=pcm_16000"


@dataclass
class FakeServer:
    port: int
    standin: Standin
    state: ServerState

    @contextlib.contextmanager
    def connect(self, path: str = MULTI, voice: str = "default") -> Iterator[ClientConnection]:
        url = f"ws://127.0.0.1:{self.port}/v1/text-to-speech/{voice}/{path}"
        with connect(url) as socket:
            yield socket


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    standin, home = Standin(), tmp_path_factory.mktemp("voices")
    state = state_with(standin, Limits(text_characters=100), home)
    with listening(state) as port:
        yield FakeServer(port, standin, state)


@pytest.fixture
def server(running: FakeServer) -> Iterator[FakeServer]:
    """The engine waits after its first chunk until the test sets `go_on`; afterwards nothing is in flight."""
    running.standin.go_on.clear()
    running.standin.begun.clear()
    running.standin.spoken.clear()
    yield running
    wait_until(lambda: running.state.queue.in_flight == 0)


def send(socket: ClientConnection, **message: Any) -> None:
    socket.send(json.dumps(message))


def receive(socket: ClientConnection) -> dict[str, Any]:
    message = json.loads(socket.recv(timeout=240))
    assert isinstance(message, dict)
    return message


def until_final(socket: ClientConnection) -> dict[str | None, int]:
    """Return the bytes of audio of each context, up to the first final message."""
    received: dict[str | None, int] = {}
    while not (message := receive(socket)).get("isFinal"):
        context = message.get("contextId")
        received[context] = received.get(context, 0) + len(base64.b64decode(message["audio"]))
        assert message["alignment"] is None
    received.setdefault(message.get("contextId"), 0)
    return received


def closed_with(socket: ClientConnection) -> int | None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            socket.recv(timeout=240)
    return socket.close_code


def test_contexts_are_spoken_to_the_end_after_a_flush(server: FakeServer) -> None:
    server.standin.go_on.set()
    with server.connect() as socket:
        for name in ("a", "b"):
            send(socket, text=" ", context_id=name, voice_settings={"stability": 0.5})
            send(socket, text=f"Hello {name}. ", context_id=name)
            send(socket, context_id=name, flush=True)
            send(socket, context_id=name, close_context=True)
        received = [until_final(socket), until_final(socket)]
    assert sum(each.get("a", 0) for each in received) == WHOLE
    assert sum(each.get("b", 0) for each in received) == WHOLE


def test_closing_a_context_before_a_flush_interrupts_it_and_leaves_the_others(server: FakeServer) -> None:
    with server.connect(f"{MULTI}&auto_mode=true") as socket:
        send(socket, text="Stop me. ", context_id="a", voice_settings={"stability": 0.5, "speed": 1.0})
        assert receive(socket)["contextId"] == "a"
        send(socket, text="Keep me. ", contextId="b")
        assert receive(socket)["contextId"] == "b"
        send(socket, context_id="a", close_context=True)
        final = receive(socket)
        assert (final["contextId"], final["isFinal"], final["spoken"]["characters"]) == ("a", True, 0)
        assert final["interrupted"]["characters"] == len("Stop me. ")
        assert final["ignored"] == ["voice_settings.stability"]
        server.standin.go_on.set()
        send(socket, context_id="b", flush=True)
        send(socket, context_id="b", close_context=True)
        assert until_final(socket) == {"b": WHOLE - FIRST}
    assert server.standin.spoken == ["Keep me. "]


def test_closing_a_context_again_interrupts_it(server: FakeServer) -> None:
    with server.connect() as socket:
        send(socket, text="Stop me. ", context_id="a", flush=True)
        assert receive(socket)["audio"]
        send(socket, context_id="a", close_context=True)
        send(socket, context_id="a", close_context=True)
        assert until_final(socket) == {"a": 0}
        send(socket, context_id="a", close_context=True)  # ended already
        send(socket, text="")  # keeps the socket open
        server.standin.go_on.set()
        send(socket, text="Again. ", context_id="a", flush=True)
        send(socket, context_id="a", close_context=True)
        assert until_final(socket) == {"a": WHOLE}
    assert server.standin.spoken == ["Again. "]


def test_an_error_of_one_context_leaves_the_others(server: FakeServer) -> None:
    server.standin.go_on.set()
    with server.connect() as socket:
        send(socket, text="x" * 101, context_id="long")
        error = receive(socket)
        assert (error["contextId"], error["error"]) == ("long", "text_error")
        send(socket, text="Hello. ", context_id="short", flush=True)
        send(socket, context_id="short", close_context=True)
        assert until_final(socket) == {"short": WHOLE}


def test_close_socket_speaks_the_rest_and_closes(server: FakeServer) -> None:
    server.standin.go_on.set()
    with server.connect() as socket:
        send(socket, text="Hello there", context_id="a")
        send(socket, close_socket=True)
        assert until_final(socket) == {"a": WHOLE}
        assert closed_with(socket) == 1000
    with server.connect() as socket:
        send(socket, close_socket=True)
        assert closed_with(socket) == 1000


def test_the_number_of_contexts_is_limited(server: FakeServer) -> None:
    with server.connect() as socket:
        for number in range(17):
            send(socket, text=" ", context_id=str(number))
        error = receive(socket)
        assert (error["contextId"], error["error"]) == ("16", "invalid_request")


def test_an_empty_text_ends_stream_input(server: FakeServer) -> None:
    server.standin.go_on.set()
    with server.connect("stream-input?output_format=pcm_16000") as socket:
        send(socket, text=" ", generation_config={"chunk_length_schedule": [50]}, try_trigger_generation=True)
        send(socket, text="Hello. ")
        send(socket, text="")
        received = until_final(socket)
        assert received == {None: WHOLE}
        assert closed_with(socket) == 1000


@pytest.mark.parametrize(
    "message",
    ['{"text": 5}', "{", "[]", '{"txt": "Hello."}', b"\x81", '{"text": "a", "voice_settings": {"speed": 9}}',
     '{"text": "Hello.", "context_id": "' + "c" * 300 + '"}', '{"text": "' + "a" * 70_000 + '"}'],
)  # fmt: skip
def test_malformed_messages_are_an_error_that_closes_the_socket(server: FakeServer, message: str | bytes) -> None:
    with server.connect() as socket:
        socket.send(message)
        assert {"message", "error"} <= receive(socket).keys()
        assert closed_with(socket) == 1008


def test_the_longest_message_in_characters_of_four_bytes_is_read(server: FakeServer) -> None:
    with server.connect() as socket:
        socket.send('{"text": "' + "\N{GRINNING FACE}" * (MAX_EVENT_BYTES - 12) + '"}')
        assert "100 characters" in receive(socket)["message"]


def frame_header(size: int) -> bytes:
    """Return the header of a masked text frame of `size` bytes."""
    return b"\x81\xff" + size.to_bytes(8, "big") + bytes(4)


def test_a_larger_message_is_refused_by_its_header(server: FakeServer) -> None:
    with server.connect() as live:
        live.socket.sendall(frame_header(MAX_MESSAGE_BYTES + 1))
        assert closed_with(live) == 1009


def test_a_larger_message_that_is_sent_with_the_handshake_is_not_buffered(server: FakeServer) -> None:
    """The limit of the route is not known yet when the header of the message arrives."""
    target = f"/v1/text-to-speech/default/{MULTI}"
    lines = (f"GET {target} HTTP/1.1", "Host: localhost", "Connection: Upgrade", "Upgrade: websocket")
    key = ("Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13")
    size = server.state.config.limits.body_bytes
    with create_connection(("127.0.0.1", server.port), timeout=240) as line:
        line.sendall("\r\n".join([*lines, *key, "", ""]).encode() + frame_header(size))
        assert line.recv(100).startswith(b"HTTP/1.1 101 ")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):  # the server ends the connection
            line.sendall(bytes(size))
    wait_until(lambda: server.state.body_budget.used == 0)


@pytest.mark.parametrize(
    ("path", "voice", "status"),
    [(MULTI, "nobody", 404), ("stream-input?output_format=midi", "default", 422),
     ("stream-input?seed=-1", "default", 422), (MULTI, "a.b", 400)],
)  # fmt: skip
def test_a_handshake_that_cannot_be_served_is_rejected(server: FakeServer, path: str, voice: str, status: int) -> None:
    with pytest.raises(InvalidStatus) as refused, server.connect(path, voice):
        pass
    assert refused.value.response.status_code == status
    assert "detail" in json.loads(refused.value.response.body)


def test_a_disconnect_cancels_all_contexts(server: FakeServer) -> None:
    with server.connect() as socket:
        for name in "ab":
            send(socket, text="Hello. ", context_id=name, flush=True)
        wait_until(lambda: len(server.standin.begun) == 2)
    wait_until(lambda: server.state.queue.in_flight == 0)
    assert server.standin.spoken == []


def test_contexts_of_the_dialogue_socket_name_their_voice(server: FakeServer) -> None:
    server.standin.go_on.set()
    url = f"ws://127.0.0.1:{server.port}/v1/text-to-dialogue/multi-stream-input?output_format=pcm_16000"
    with connect(url) as socket:
        send(socket, context_id="a", voices=["default"])
        send(socket, context_id="a", keep_alive=True)
        send(socket, context_id="a", inputs=[{"text": "Hello. ", "voice_id": "default"}], flush=True)
        send(socket, context_id="a", close_context=True)
        received = 0
        while not (message := receive(socket)).get("is_final"):
            received += len(base64.b64decode(message["audio"]))
        assert (received, message["context_id"]) == (WHOLE, "a")
        send(socket, context_id="silent", voices=["default"])
        send(socket, context_id="silent", close_context=True)
        final = receive(socket)
        assert (final["context_id"], final["is_final"]) == ("silent", True)
        send(socket, context_id="b", voices=["nobody"])
        assert receive(socket)["error"] == "voice_not_found"
        assert closed_with(socket) == 1008
    with connect(url) as socket:
        send(socket, context_id="a", voices=["default", "alloy"])
        assert "one voice" in receive(socket)["message"]
    with connect(url) as socket:
        for number in range(33):
            send(socket, context_id=str(number), voices=["default"])
        assert "32 contexts are announced" in receive(socket)["message"]


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[int]:
    """The port of a server with one key, which may send two requests per minute."""
    limits = KeyLimits(requests_per_minute=2)
    config = ServerConfig(api_keys=(KEY,), key_limits=limits)
    standin = Standin()
    standin.go_on.set()
    engine = EngineHandle(standin, VoiceStore(tmp_path), 25.0)
    with listening(create_state(config, EngineLifecycle(lambda: engine, engine), 4)) as port:
        yield port


def test_keys_and_their_limits_hold(limited: int) -> None:
    url = f"ws://127.0.0.1:{limited}/v1/text-to-speech/default/{MULTI}"
    with pytest.raises(InvalidStatus) as refused, connect(url):
        pass
    assert refused.value.response.status_code == 401
    with connect(url, additional_headers={"xi-api-key": KEY}) as socket:
        for name in "abc":
            send(socket, text="Hello. ", context_id=name, flush=True)
            send(socket, context_id=name, close_context=True)
        messages = [receive(socket)]
        while len([message for message in messages if message.get("isFinal") or "error" in message]) < 3:
            messages.append(receive(socket))
    errors = [(message["contextId"], message["error"]) for message in messages if "error" in message]
    assert errors == [("c", "rate_limited")]
    with pytest.raises(InvalidStatus) as late, connect(url, additional_headers={"xi-api-key": KEY}):
        pass
    assert late.value.response.status_code == 429
    assert int(late.value.response.headers["retry-after"]) > 0
