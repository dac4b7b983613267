"""The Wyoming protocol with the published client, the library that Home Assistant uses."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable

import pytest
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.event import Event, Eventable
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)

from tests.nano import OTHER_VOICE, PCM_BYTES_PER_SECOND, SAMPLE_RATE, VOICES, is_plausible
from tests.server.conftest import Serving

TIMEOUT = 240.0


def wyoming_port(nano: Serving) -> int:
    lines = [json.loads(line)["message"] for line in nano.log.read_text().splitlines() if "wyoming: listening" in line]
    return int(lines[0].rpartition(" ")[2])


def talk(nano: Serving, conversation: Callable[[AsyncTcpClient], Awaitable[list[Event]]]) -> list[Event]:
    async def run() -> list[Event]:
        async with asyncio.timeout(TIMEOUT), AsyncTcpClient("127.0.0.1", wyoming_port(nano)) as client:
            return await conversation(client)

    return asyncio.run(run())


def ask(nano: Serving, *messages: Eventable, last: str) -> list[Event]:
    """Send messages and return the events up to the type `last`."""

    async def conversation(client: AsyncTcpClient) -> list[Event]:
        for message in messages:
            await client.write_event(message.event())
        events: list[Event] = []
        while not events or events[-1].type != last:
            event = await client.read_event()
            assert event is not None, events
            events.append(event)
        return events

    return talk(nano, conversation)


def seconds_of(events: list[Event]) -> float:
    return sum(len(event.payload or b"") for event in events if AudioChunk.is_type(event.type)) / PCM_BYTES_PER_SECOND


def test_describe_lists_the_voices(nano: Serving) -> None:
    (event,) = ask(nano, Describe(), last="info")
    (program,) = Info.from_event(event).tts
    assert program.supports_synthesize_streaming
    assert set(VOICES) <= {voice.name for voice in program.voices}
    assert program.voices[0].languages == ["en"]


def test_synthesize_returns_the_audio_of_the_voice(nano: Serving) -> None:
    events = ask(nano, Synthesize("Good morning.", SynthesizeVoice(OTHER_VOICE)), last="audio-stop")
    start = AudioStart.from_event(events[0])
    assert (start.rate, start.width, start.channels) == (SAMPLE_RATE, 2, 1)
    assert AudioStop.is_type(events[-1].type)
    assert is_plausible(seconds_of(events), "Good morning.")


def test_streamed_text_is_spoken_and_the_repeated_text_is_not(nano: Serving) -> None:
    """Home Assistant also sends the whole text as `synthesize`, for servers that do not stream."""
    text = "Good morning. The tide is coming in."
    chunks = [SynthesizeChunk(text[:9]), SynthesizeChunk(text[9:])]
    events = ask(
        nano, SynthesizeStart(), *chunks, Synthesize(text), SynthesizeStop(), last=SynthesizeStopped().event().type
    )
    assert [event.type for event in events].count("audio-start") == 1
    assert is_plausible(seconds_of(events), text)


def test_a_connection_serves_several_texts(nano: Serving) -> None:
    async def read_until(client: AsyncTcpClient, last: str) -> list[Event]:
        events: list[Event] = []
        while not events or events[-1].type != last:
            event = await client.read_event()
            assert event is not None, events
            events.append(event)
        return events

    async def conversation(client: AsyncTcpClient) -> list[Event]:
        for text in ("One.", "..."):  # the second has nothing to speak, and ends all the same
            await client.write_event(Synthesize(text).event())
            await read_until(client, "audio-stop")
        await client.write_event(Ping("still here").event())
        return await read_until(client, "pong")

    assert Pong.from_event(talk(nano, conversation)[-1]).text == "still here"


def test_an_unknown_voice_is_an_error(nano: Serving) -> None:
    (event,) = ask(nano, Synthesize("Hello.", SynthesizeVoice("nobody")), last="error")
    assert (Error.from_event(event).code, "nobody" in Error.from_event(event).text) == ("voice_not_found", True)


@pytest.mark.parametrize(
    "sent",
    [
        b"{}\n",
        b"[]\n",
        b"\x00\xff\n",
        b'{"type": "synthesize", "data": {"text": 5}}\n',
        b'{"type": "synthesize", "data": {"text": "Hi.", "voice": "a name"}}\n',
        b'{"type": "synthesize", "data_length": 1000000000}\n',
        b'{"type": "audio-chunk", "payload_length": 1000000000}\n',
        b'{"type": "' + b"x" * 70_000,
    ],
)
def test_malformed_events_are_an_error_that_closes_the_connection(nano: Serving, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", wyoming_port(nano)), timeout=TIMEOUT) as line:
        line.sendall(sent)
        answer = b"".join(iter(lambda: line.recv(65_536), b""))
    assert json.loads(answer.splitlines()[0])["type"] == "error"
