"""The bridge wyoming-openai 0.8: its requests, and the program itself where `scripts/wyoming-openai` installed it."""

import asyncio
import contextlib
import os
import subprocess
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import httpx
import pytest
from wyoming.audio import AudioChunk, AudioStart
from wyoming.client import AsyncTcpClient
from wyoming.event import Event, Eventable
from wyoming.info import Describe, Info
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop, SynthesizeStopped, SynthesizeVoice

from shoal.paths import cache_directory
from tests.clients.conftest import KEY
from tests.nano import OTHER_VOICE, PCM_BYTES_PER_SECOND, SAMPLE_RATE, VOICES, is_plausible
from tests.server.conftest import Serving, free_port
from tests.waiting import TIMEOUT_SECONDS, wait_until

PYTHON = cache_directory() / "tests" / "wyoming-openai-0.8.0" / "bin" / "python"  # as in scripts/wyoming-openai
TEXT = "Good morning. The tide is coming in."


@dataclass
class Bridge:
    port: int
    log: Path

    def ask(self, *messages: Eventable, last: str) -> list[Event]:
        """Send messages and return the events up to the type `last`."""

        async def talk() -> list[Event]:
            events: list[Event] = []
            async with asyncio.timeout(TIMEOUT_SECONDS), AsyncTcpClient("127.0.0.1", self.port) as client:
                for message in messages:
                    await client.write_event(message.event())
                while not events or events[-1].type != last:
                    event = await client.read_event()
                    assert event is not None, self.log.read_text()
                    events.append(event)
            return events

        return asyncio.run(talk())


@pytest.fixture(scope="module")
def bridge(nano: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    if not PYTHON.exists():
        pytest.skip("needs wyoming-openai, which needs Python 3.12: scripts/wyoming-openai")
    bridge = Bridge(free_port(), tmp_path_factory.mktemp("bridge") / "log")
    flags = {
        "--uri": f"tcp://127.0.0.1:{bridge.port}",
        "--tts-openai-url": f"{nano.url}/v1",
        "--tts-openai-key": KEY,
        "--tts-backend": "KOKORO_FASTAPI",
        "--tts-models": "tts-1",
        "--tts-streaming-models": "tts-1",
    }
    command = [str(PYTHON), "-m", "wyoming_openai", *(part for flag in flags.items() for part in flag)]
    without_ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with bridge.log.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=without_ours, cwd=bridge.log.parent)

    def listens() -> bool:
        assert process.poll() is None, bridge.log.read_text()
        with contextlib.suppress(OSError):
            return bool(bridge.ask(Describe(), last="info"))
        return False

    try:
        wait_until(listens, bridge.log.read_text, interval=0.1)
        yield bridge
    finally:
        process.terminate()
        process.wait(TIMEOUT_SECONDS)


def seconds_of(events: list[Event]) -> float:
    return sum(len(event.payload or b"") for event in events if AudioChunk.is_type(event.type)) / PCM_BYTES_PER_SECOND


def test_the_bridge_lists_the_voices_of_the_server(bridge: Bridge) -> None:
    (event,) = bridge.ask(Describe(), last="info")
    (program,) = Info.from_event(event).tts
    assert program.supports_synthesize_streaming
    assert set(VOICES) <= {voice.name for voice in program.voices}


def test_the_bridge_speaks_whole_and_streamed_texts(bridge: Bridge) -> None:
    voice = SynthesizeVoice(OTHER_VOICE)
    whole = bridge.ask(Synthesize(TEXT, voice), last="audio-stop")
    pieces = [SynthesizeChunk(TEXT[:8]), SynthesizeChunk(TEXT[8:])]
    streamed = bridge.ask(
        SynthesizeStart(voice=voice), *pieces, SynthesizeStop(), last=SynthesizeStopped().event().type
    )
    for events in (whole, streamed):
        begun = AudioStart.from_event(events[0])
        assert (begun.rate, begun.width, begun.channels) == (SAMPLE_RATE, 2, 1)
        assert is_plausible(seconds_of(events), TEXT)


def test_the_requests_of_the_bridge_are_answered_as_it_expects(nano: Serving) -> None:
    """It asks for the voices without its key, and finds out by three paths which server it talks to."""
    http = nano.client()
    assert set(VOICES) <= {voice["id"] for voice in http.get("/v1/audio/voices").json()["voices"]}
    for path in ("/v1/readyz", "/v1/test"):  # LocalAI's and Kokoro-FastAPI's: without them it assumes OpenAI
        assert http.get(path).status_code == 404
    assert http.get("/health").text != "OK"  # Speaches' answer
    body = {"model": "tts-1", "voice": OTHER_VOICE, "input": TEXT, "response_format": "wav"}
    answer = http.post("/v1/audio/speech", json=body, headers={"authorization": f"Bearer {KEY}"})
    assert answer.headers["content-type"] == "audio/wav"
    with wave.open(BytesIO(answer.content)) as audio:
        assert (audio.getframerate(), audio.getsampwidth(), audio.getnchannels()) == (SAMPLE_RATE, 2, 1)
        assert is_plausible(len(audio.readframes(1 << 24)) / PCM_BYTES_PER_SECOND, TEXT)


def test_only_the_lists_need_no_key(nano: Serving) -> None:
    http: httpx.Client = nano.client()
    assert http.get("/v1/audio/models").status_code == 200
    body = {"model": "tts-1", "voice": OTHER_VOICE, "input": TEXT}
    assert http.post("/v1/audio/speech", json=body).status_code == 401
    assert http.delete(f"/v1/audio/voices/{OTHER_VOICE}").status_code == 401
