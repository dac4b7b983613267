"""The live socket, with the published clients and with raw messages."""

import asyncio
import signal
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import ormsgpack
import pytest
from fastapi import WebSocket, WebSocketDisconnect
from starlette.websockets import WebSocketState
from websockets.sync.client import ClientConnection

from shoal.api.config import KeyLimits, Limits, ServerConfig
from shoal.api.engine_client import EngineHandle, EngineLifecycle
from shoal.api.keys import ANONYMOUS
from shoal.api.live.events import TextBuffer, TextPiece
from shoal.api.state import ServerState, create_state
from shoal.audio.decode import AudioLimits, read_audio
from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.engine import Engine
from shoal.engine.load import voice_cache
from shoal.server.routes.fish.live import FishSocket
from shoal.voices.store import VoiceStore
from tests.server.conftest import Serving, Start
from tests.server.standin import RATE, Standin, counted, listening, state_with
from tests.waiting import wait_until
from tests.websocket import connect

ANY_LENGTH = AudioLimits(min_seconds=0.0)
FRAME = 0.04  # seconds; the published client sends no seed, so each piece of text is at least this long
START = {"text": "", "format": "pcm", "max_new_tokens": 8, "seed": 1}


def words() -> Iterator[str]:
    yield from ("Hello there, ", "this is the first sentence of all. ", "And this ", "is the second one. ", "Bye.")


def test_the_new_client_streams_text_and_receives_audio(server: Serving) -> None:
    from fishaudio import FishAudio
    from fishaudio.types import FlushEvent, TTSConfig

    client = FishAudio(api_key="any", base_url=server.url, httpx_client=server.client())
    config = TTSConfig(format="wav", max_new_tokens=10)
    audio = b"".join(client.tts.stream_websocket(words(), config=config))
    assert read_audio(audio, 16_000, ANY_LENGTH).seconds >= FRAME
    flushed = client.tts.stream_websocket(iter(["Hello.", FlushEvent(), "Again."]), config=TTSConfig(max_new_tokens=5))
    assert read_audio(b"".join(flushed), 16_000, ANY_LENGTH).seconds >= 2 * FRAME


def test_the_new_client_streams_without_blocking(server: Serving) -> None:
    from fishaudio import AsyncFishAudio
    from fishaudio.types import TTSConfig

    async def text() -> AsyncIterator[str]:
        for word in words():
            yield word

    async def speak() -> bytes:
        async with AsyncFishAudio(api_key="any", base_url=server.url) as client:
            stream = client.tts.stream_websocket(text(), config=TTSConfig(format="wav", max_new_tokens=5))
            return b"".join([piece async for piece in stream])

    assert read_audio(asyncio.run(speak()), 16_000, ANY_LENGTH).seconds >= FRAME


def test_the_legacy_client_streams_too(server: Serving) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fish_audio_sdk import TTSRequest, WebSocketSession
    with WebSocketSession("any", base_url=server.url) as session:
        audio = b"".join(session.tts(TTSRequest(text="", format="wav"), iter(["Hello."])))
    assert audio.startswith(b"RIFF")


def send(socket: ClientConnection, **event: Any) -> None:
    socket.send(ormsgpack.packb(event))


def receive(socket: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = ormsgpack.unpackb(socket.recv(timeout=240))  # type: ignore[arg-type]
    return event


def receive_all(socket: ClientConnection) -> list[dict[str, Any]]:
    """Receive all events up to `finish`."""
    events = [receive(socket)]
    while events[-1]["event"] == "audio":
        events.append(receive(socket))
    return events


def sounds(events: list[dict[str, Any]]) -> int:
    """Count the bytes of audio."""
    return sum(len(event["audio"]) for event in events if event["event"] == "audio")


def live(server: Serving) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}/v1/tts/live")


def test_flushed_text_is_spoken_before_the_session_ends(server: Serving) -> None:
    with live(server) as socket:
        send(socket, event="start", request=START)
        send(socket, event="text", text="Hi")
        send(socket, event="flush")
        assert receive(socket)["event"] == "audio"
        send(socket, event="stop")
        events = [receive(socket)]
        while events[-1]["event"] == "audio":
            events.append(receive(socket))
    assert (events[-1]["event"], events[-1]["reason"]) == ("finish", "stop")
    assert events[-1]["spoken"]["characters"] == 2


def test_markup_without_words_is_skipped_and_the_text_after_it_is_spoken(server: Serving) -> None:
    with live(server) as socket:
        send(socket, event="start", request=START | {"min_chunk_length": 0})
        for text in ("Run this:\n", "```bash\n", "make install\n", "<!-- no words -->\n", "```\n", "Done."):
            send(socket, event="text", text=text)
        send(socket, event="stop")
        *_, finish = receive_all(socket)
    assert (finish["event"], finish["reason"]) == ("finish", "stop")
    assert finish["spoken"]["characters"] == 58


def test_a_text_without_words_is_a_short_silence(server: Serving) -> None:
    """Agent frameworks take a reply without audio for a failure of the service."""
    with live(server) as socket:
        send(socket, event="start", request=START)
        for text in ("  … ", "\N{PARTY POPPER}"):
            send(socket, event="text", text=text)
            send(socket, event="flush")
            audio = receive(socket)["audio"]
            assert len(audio) == round(0.2 * 2 * RATE)
            assert not any(audio)
        send(socket, event="stop")
        assert receive(socket) == {
            "event": "finish",
            "reason": "stop",
            "spoken": {"characters": 0, "audio_seconds": 0.4},
        }


def test_a_session_without_text_sends_no_audio(server: Serving) -> None:
    with live(server) as socket:
        send(socket, event="start", request=START)
        send(socket, event="text", text=" \n ")
        send(socket, event="flush")
        send(socket, event="stop")
        assert receive(socket) == {
            "event": "finish",
            "reason": "stop",
            "spoken": {"characters": 0, "audio_seconds": 0.0},
        }


def test_words_need_no_silence_after_them(held: tuple[ServerState, Standin, ClientConnection]) -> None:
    _, standin, socket = held
    standin.go_on.set()
    send(socket, event="start", request={**START, "min_chunk_length": 0})
    send(socket, event="text", text="Hi. \N{PARTY POPPER}")
    send(socket, event="flush")
    send(socket, event="stop")
    *_, finish = receive_all(socket)
    assert finish["spoken"]["audio_seconds"] == pytest.approx(0.1 + standin.rest / RATE)


@pytest.mark.parametrize(
    "events",
    [
        [{"event": "text", "text": "Hi"}],
        [{"event": "start", "request": {**START, "colour": "blue"}}],
        [{"event": "start", "request": START}, {"event": "sing"}],
        [
            {"event": "start", "request": {**START, "reference_id": "nobody"}},
            {"event": "text", "text": "Hi"},
            {"event": "flush"},
        ],
        [{"event": "start", "request": START}, {"event": "text", "text": "x" * 10_001}],
        ["start"],
        [b"\xc1\xff"],
    ],
)
def test_wrong_events_end_with_an_error(server: Serving, events: list[Any]) -> None:
    with live(server) as socket:
        for event in events:
            socket.send(event if isinstance(event, bytes) else ormsgpack.packb(event))
        finish = receive(socket)
    assert (finish["event"], finish["reason"]) == ("finish", "error")
    assert finish["message"]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"event": "text", "text": 5}, "text: Input should be a valid string"),
        ({"event": "text"}, "text: Field required"),
        ({"event": "text", "text": "Hi", "colour": "blue"}, "colour: unknown field; there are event, text"),
        ({"event": "stop", "now": True}, "now: unknown field; there are event"),
        ({"event": "start", "request": START}, "this session has started already: send text, flush, stop or cancel"),
        ({"event": "sing"}, "unknown event 'sing': send start, text, flush, stop or cancel"),
        ({"event": 5}, "an event is a map with its name under the key `event`"),
        ({"text": "Hi"}, "an event is a map with its name under the key `event`"),
    ],
)
def test_an_invalid_event_is_answered_with_its_error(server: Serving, event: dict[str, Any], expected: str) -> None:
    with live(server) as socket:
        send(socket, event="start", request=START)
        send(socket, **event)
        assert receive(socket) == {"event": "finish", "reason": "error", "message": expected}


def test_the_first_event_must_be_a_start(server: Serving) -> None:
    with live(server) as socket:
        send(socket, event="start", request=START, colour="blue")
        assert receive(socket)["message"] == "colour: unknown field; there are event, request"


def test_a_session_is_not_idle_while_it_speaks(tmp_path: Path) -> None:
    """Each text takes less time than the idle timeout, all of them together more."""
    standin = Standin(pause=0.4)
    standin.go_on.set()
    state = state_with(standin, Limits(live_idle_seconds=0.5), tmp_path)
    with listening(state) as port, connect(f"ws://127.0.0.1:{port}/v1/tts/live") as socket:
        send(socket, event="start", request=START)
        for text in ("One.", "Two.", "Three.", "Four."):
            send(socket, event="text", text=text)
            send(socket, event="flush")
        *_, finish = receive_all(socket)
    assert standin.spoken == ["One.", "Two.", "Three.", "Four."]
    assert finish == {"event": "finish", "reason": "stop", "message": "no message arrived for 0.5 seconds"}
    assert socket.close_code == 1000
    assert state.queue.in_flight == 0


def test_text_received_before_a_shutdown_is_spoken(start_server: Start) -> None:
    """Shutdown waits for text that sessions already have; text that arrives later is rejected."""
    serving = start_server(slots=2)
    wild = {"text": "", "format": "pcm", "seed": 10, "temperature": 1.5, "top_p": 1.0, "max_new_tokens": 100}
    texts = [f"Hello there, number {name}." for name in ("one", "two", "three")]

    def say(socket: ClientConnection) -> None:
        send(socket, event="start", request=wild)
        for text in texts:
            send(socket, event="text", text=text)
            send(socket, event="flush")

    with live(serving) as socket:
        say(socket)
        send(socket, event="stop")
        whole = sounds(receive_all(socket))
    with live(serving) as one, live(serving) as other:
        say(one)
        send(one, event="stop")
        say(other)
        first = [receive(one), receive(other)]
        serving.process.send_signal(signal.SIGTERM)
        with serving.client() as http:
            wait_until(lambda: http.get("/ready").json()["state"] == "stopping")
        send(other, event="text", text="And one more.")
        ended, refused = receive_all(one), receive_all(other)
    assert ended[-1]["reason"] == "stop"
    assert sounds([first[0], *ended]) == whole
    assert refused[-1]["message"] == "the model is not ready: the server is stopping"
    assert sounds([first[1], *refused]) == whole
    assert serving.process.wait(240) == 0


def test_a_client_that_disconnects_frees_its_queue_place(server: Serving) -> None:
    with live(server) as socket:
        send(socket, event="start", request={**START, "max_new_tokens": 800})
        send(socket, event="text", text="Hello there.")
        send(socket, event="flush")
        assert receive(socket)["event"] == "audio"
    with server.client() as http:
        for _ in range(100):
            if http.get("/ready").json()["in_flight"] == 0:
                return
    raise AssertionError("the speech goes on")


class Unread:
    """A socket whose client reads nothing, and disconnects when `gone` is set."""

    application_state = WebSocketState.CONNECTED

    def __init__(self, *events: dict[str, Any]) -> None:
        self._events = list(map(ormsgpack.packb, events))
        self.sending, self.gone = asyncio.Event(), asyncio.Event()

    async def receive_bytes(self) -> bytes:
        if not self._events:
            await self.gone.wait()
            raise WebSocketDisconnect
        return self._events.pop(0)

    async def send_bytes(self, message: bytes) -> None:
        self.sending.set()
        await asyncio.Event().wait()


def test_a_disconnect_during_a_send_cancels_the_request_and_is_no_error(tiny: Checkpoint, tmp_path: Path) -> None:
    socket = Unread(
        {"event": "start", "request": {**START, "max_new_tokens": 800}},
        {"event": "text", "text": "Hello there."},
        {"event": "flush"},
    )

    async def cancel_early(state: ServerState) -> None:
        session = asyncio.create_task(FishSocket(cast(WebSocket, socket), state, ANONYMOUS, "me").run())
        await asyncio.wait_for(socket.sending.wait(), 240)
        socket.gone.set()
        await session
        # Immediately, not when the generator is garbage collected.
        left = {"api": "live", "outcome": "disconnected"}
        assert state.metrics.registry.get_sample_value("shoal_requests_total", left) == 1
        assert state.queue.in_flight == 0

    core = EngineCore(tiny, EngineConfig(slots=2, guard=False))
    with Engine(core, voice_cache(tiny, tmp_path)) as engine:
        loaded = EngineHandle(engine.service, VoiceStore(tmp_path), 25.0)
        asyncio.run(cancel_early(create_state(ServerConfig(), EngineLifecycle(lambda: loaded, loaded), 2)))


def test_a_disconnect_after_stop_frees_the_queue_place(tmp_path: Path) -> None:
    standin = Standin()  # continues only after the client has disconnected
    state = state_with(standin, Limits(), tmp_path)
    with listening(state) as port:
        with connect(f"ws://127.0.0.1:{port}/v1/tts/live") as socket:
            send(socket, event="start", request=START)
            send(socket, event="text", text="Hello there.")
            send(socket, event="stop")
            assert receive(socket)["event"] == "audio"
            assert state.queue.in_flight == 1
        wait_until(lambda: state.queue.in_flight == 0)
        assert counted(state, "live", "disconnected") == 1
        assert standin.spoken == []
        standin.go_on.set()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[ServerState, Standin, ClientConnection]]:
    """A socket to a server whose speech stops after its first chunk until `go_on` is set."""
    standin = Standin()
    state = state_with(standin, Limits(), tmp_path)
    with listening(state) as port:
        with connect(f"ws://127.0.0.1:{port}/v1/tts/live") as socket:
            yield state, standin, socket
        standin.go_on.set()


def test_cancel_frees_the_place_reports_what_was_spoken_and_keeps_the_socket(
    held: tuple[ServerState, Standin, ClientConnection],
) -> None:
    state, standin, socket = held
    standin.go_on.set()
    send(socket, event="start", request=START)
    send(socket, event="text", text="One. ")
    send(socket, event="flush")
    wait_until(lambda: standin.spoken == ["One. "])
    standin.go_on.clear()
    send(socket, event="text", text="Number two.")
    send(socket, event="flush")
    send(socket, event="text", text="Never spoken.")
    wait_until(lambda: standin.begun == ["One. ", "Number two."])
    send(socket, event="cancel")
    *_, finish = receive_all(socket)
    assert finish["reason"] == "cancel"
    assert finish["spoken"]["characters"] == len("One. ")
    assert finish["interrupted"]["characters"] == len("Number two.")
    assert 0 <= finish["interrupted"]["audio_seconds"] <= 0.1
    assert state.queue.in_flight == 0
    assert counted(state, "live", "interrupted") == 1
    standin.go_on.set()
    send(socket, event="start", request={**START, "text": "Another session.", "features": ["quality-guard", "x-ray"]})
    send(socket, event="stop")
    *_, finish = receive_all(socket)
    assert finish["reason"] == "stop"
    assert standin.spoken == ["One. ", "Another session."]
    assert finish["ignored"] == ["features.x-ray"]


def test_the_end_of_a_flushed_sentence_does_not_wait_for_the_next(
    held: tuple[ServerState, Standin, ClientConnection],
) -> None:
    """Changing the sample rate holds samples back; a flush releases them."""
    _, standin, socket = held
    standin.go_on.set()
    send(socket, event="start", request={**START, "sample_rate": 24_000})
    send(socket, event="text", text="Hello.")
    send(socket, event="flush")
    expected, received = 2 * round((standin.rest / RATE + 0.1) * 24_000), 0
    while received < expected:
        received += len(receive(socket)["audio"])
    assert received == expected


@pytest.mark.parametrize("conditioned", [True, False])
def test_sentences_continue_the_ones_of_their_session(
    held: tuple[ServerState, Standin, ClientConnection], conditioned: bool
) -> None:
    _, standin, socket = held
    standin.go_on.set()
    for _ in range(2):
        send(socket, event="start", request={**START, "condition_on_previous_chunks": conditioned})
        for text in ("One.", "Two.", "Three."):
            send(socket, event="text", text=text)
            send(socket, event="flush")
        send(socket, event="stop")
        receive_all(socket)
    session = [(), ("One.",), ("One.", "Two.")] if conditioned else [None] * 3
    assert standin.contexts == session * 2


def test_cancel_after_the_session_has_ended_is_ignored(held: tuple[ServerState, Standin, ClientConnection]) -> None:
    _, standin, socket = held
    standin.go_on.set()
    for _ in range(2):
        send(socket, event="cancel")
        send(socket, event="start", request={**START, "text": "Hello."})
        send(socket, event="stop")
        *_, finish = receive_all(socket)
        assert finish["reason"] == "stop"


def test_text_after_stop_is_an_error(held: tuple[ServerState, Standin, ClientConnection]) -> None:
    _, _, socket = held
    send(socket, event="start", request={**START, "text": "Hello."})
    send(socket, event="stop")
    send(socket, event="text", text="More.")
    *_, finish = receive_all(socket)
    assert finish["message"].startswith("this session is ending")


def test_only_the_text_that_waits_is_limited(tmp_path: Path) -> None:
    """A conversation may last for hours on one socket, but no client may queue hours of text."""
    standin = Standin()
    standin.go_on.set()
    state = state_with(standin, Limits(text_characters=12), tmp_path)
    with listening(state) as port, connect(f"ws://127.0.0.1:{port}/v1/tts/live") as socket:
        send(socket, event="start", request=START)
        for number in range(4):
            send(socket, event="text", text="Ten chars.")
            send(socket, event="flush")
            wait_until(lambda number=number: len(standin.ended) == number + 1)  # type: ignore[misc]
        send(socket, event="text", text="Thirteen more")
        *_, finish = receive_all(socket)
    assert finish["message"] == "more than 12 characters wait to be spoken: send the text more slowly"


def test_each_session_of_a_socket_counts_as_a_request(tmp_path: Path) -> None:
    standin = Standin()
    standin.go_on.set()
    engine = EngineHandle(standin, VoiceStore(tmp_path), 25.0)
    config = ServerConfig(key_limits=KeyLimits(requests_per_minute=2))
    state = create_state(config, EngineLifecycle(lambda: engine, engine), 4)
    with listening(state) as port, connect(f"ws://127.0.0.1:{port}/v1/tts/live") as socket:
        for _ in range(3):
            send(socket, event="start", request={**START, "text": "Hello."})
            send(socket, event="stop")
            *_, finish = receive_all(socket)
    assert finish["message"] == "this key may send 2 requests a minute"


def test_the_same_session_gives_the_same_audio_on_the_same_socket(server: Serving) -> None:
    """The context of a session is not carried into the next."""
    sessions = []
    with live(server) as socket:
        for _ in range(2):
            send(socket, event="start", request=START)
            for text in ("Hello there.", "And again."):
                send(socket, event="text", text=text)
                send(socket, event="flush")
            send(socket, event="stop")
            sessions.append(b"".join(event.get("audio", b"") for event in receive_all(socket)))
    assert sessions[0] == sessions[1]


def test_text_is_split_at_sentence_ends() -> None:
    buffer = TextBuffer(min_characters=10, max_characters=40)
    assert buffer.add("Hi. How are") == []
    assert buffer.add(" you? I am") == [TextPiece("Hi. How are you?", 16)]
    assert buffer.add(" " + "well " * 10) == [TextPiece(" I am well well well well well well", 51)]
    assert buffer.flush() == [TextPiece(" well well well well ", 72)]
    assert buffer.add("3.5") == []
    assert buffer.received == 75
    assert buffer.flush() == [TextPiece("3.5", 75)]
    assert buffer.add("...") == []
    assert buffer.flush() == []
    assert buffer.received == 78


def pieces(text: str, step: int) -> list[str]:
    """Return the pieces of a text that arrives `step` characters at a time."""
    buffer = TextBuffer(min_characters=1, max_characters=None)
    found = [piece for at in range(0, len(text), step) for piece in buffer.add(text[at : at + step])]
    return [piece.text.strip() for piece in (*found, *buffer.flush())]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_text_is_not_split_at_the_dots_of_abbreviations(step: int) -> None:
    assert pieces("Dr. Lee comes at 5 p.m. on Friday. See No. 5, e.g. by J. K. Rowling. Yes. Ok", step) == [
        "Dr. Lee comes at 5 p.m. on Friday.",
        "See No. 5, e.g. by J. K. Rowling.",
        "Yes.",
        "Ok",
    ]
    assert pieces('1. Open it.\n2. He said "No." Then he left.', step) == [
        "1. Open it.",
        '2. He said "No."',
        "Then he left.",
    ]


def test_a_sentence_that_has_arrived_to_its_end_does_not_wait_for_the_next() -> None:
    buffer = TextBuffer(min_characters=1, max_characters=None)
    assert buffer.add("It is late. ") == [TextPiece("It is late.", 11)]
    assert buffer.add("See No. ") == []
    assert buffer.add("5 now. ") == [TextPiece(" See No. 5 now.", 26)]
    assert buffer.add("Did he? No. ") == [TextPiece(" Did he?", 34)]
    assert buffer.flush() == [TextPiece(" No. ", 39)]


@pytest.mark.parametrize(
    "whole",
    [
        "<|phoneme_start|>HH AH0 L OW1<|phoneme_end|>",
        "<|speaker:1|>",
        "[in a low voice]",
        "(soft tone)",
        '<break time="1.5s" />',
        "[pause:0.5s]",
    ],
)
def test_tags_and_markers_are_not_cut(whole: str) -> None:
    text = f"one two three four {whole} five six seven eight nine ten eleven"
    for longest in range(16, len(text)):
        buffer = TextBuffer(min_characters=1, max_characters=longest)
        pieces = [piece.text for piece in [*buffer.add(text), *buffer.flush()]]
        assert "".join(pieces).replace(" ", "") == text.replace(" ", "")
        assert any(whole in piece for piece in pieces), pieces


def test_a_pause_alone_is_spoken_before_the_next_words() -> None:
    buffer = TextBuffer(min_characters=1, max_characters=40)
    assert buffer.add("Hello. [pause:1s] ") == [TextPiece("Hello.", 6)]
    assert buffer.flush() == []
    assert buffer.add('<br><break time="1s"/>\n') == []
    assert buffer.add("There. ") == [TextPiece('[pause:1s]<break time="1s"/> There.', 47)]


def test_a_tag_that_has_not_arrived_to_its_end_is_not_cut() -> None:
    buffer = TextBuffer(min_characters=1, max_characters=24)
    pieces = buffer.add("one two <|phoneme_start|>HH AH0 L ")
    pieces += [*buffer.add("OW1<|phoneme_end|> three."), *buffer.flush()]
    spoken = [piece.text.strip() for piece in pieces]
    assert spoken == ["one two", "<|phoneme_start|>HH AH0 L OW1<|phoneme_end|>", "three."]
