"""Word times in every API, over an engine under the test's control that speaks a word every half second."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ormsgpack
import pytest
from websockets.sync.client import ClientConnection

from shoal.api.config import Limits, ServerConfig
from shoal.api.engine_client import EngineHandle, EngineLifecycle
from shoal.api.state import create_state
from shoal.batch.lines import LineDefaults, LineTask, parse_line
from shoal.batch.speaker import LineSpeaker
from shoal.speech import AudioChunk, FinishReason, SpeechRequest, SpokenTurn, Word
from shoal.text.words import written_words
from shoal.voices.store import VoiceStore
from tests.server.standin import RATE, Standin, listening
from tests.websocket import connect

TEXT = "It costs $12.50 now."


class TimedStandin(Standin):
    """Speaks each word for 0.4 s after 0.1 s of silence, two words per chunk."""

    async def speak(self, request: SpeechRequest, deadline: float | None = None) -> AsyncGenerator[AudioChunk, None]:
        found = written_words(request.text)
        spoken = [
            Word(word.text, number / 2 + 0.1, number / 2 + 0.5, word.first, word.last)
            for number, word in enumerate(found)
        ]
        context = None if request.context is None else (SpokenTurn(request.text, np.zeros((10, 1), np.int32)),)
        for first in range(0, len(spoken), 2):
            part, last = spoken[first : first + 2], first + 2 >= len(spoken)
            samples = np.full(len(part) * RATE // 2, 0.1, np.float32)
            words = tuple(part) if request.timestamps else ()
            finish = FinishReason.STOP if last else None
            yield AudioChunk(samples, RATE, finish, context if last else None, words)


@dataclass
class FakeServer:
    port: int

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=240, trust_env=False, verify=False)

    def connect(self, path: str) -> ClientConnection:
        return connect(f"ws://127.0.0.1:{self.port}{path}")


def handle(voices: Path) -> EngineHandle:
    return EngineHandle(TimedStandin(), VoiceStore(voices), 25.0, word_times=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    engine = handle(tmp_path_factory.mktemp("voices"))
    with listening(create_state(ServerConfig(limits=Limits()), EngineLifecycle(lambda: engine, engine), 4)) as port:
        yield FakeServer(port)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n") if part]


def test_openai_events_have_words_at_the_speed_of_the_audio(server: FakeServer) -> None:
    body = {"model": "nano", "voice": "alloy", "input": TEXT, "response_format": "pcm", "stream_format": "sse"}
    with server.http as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        body |= {"model": model}
        plain = events(http.post("/v1/audio/speech", json=body))
        timed = events(http.post("/v1/audio/speech", json=body | {"timestamps": True, "speed": 2.0}))
        refused = http.post("/v1/audio/speech", json=body | {"timestamps": True, "stream_format": "audio"})
    assert {event["type"] for event in plain} == {"speech.audio.delta", "speech.audio.done"}
    words = [word for event in timed if event["type"] == "speech.audio.words" for word in event["words"]]
    assert [word["text"] for word in words] == ["It", "costs", "$12.50", "now."]
    assert words[2] == {"text": "$12.50", "start": 0.55, "end": 0.75, "first": 9, "last": 15}
    assert timed[-1]["type"] == "speech.audio.done"
    assert refused.status_code == 422
    assert "set stream_format to sse" in refused.text


def test_fish_events_have_segments_that_count_from_their_offset(server: FakeServer) -> None:
    with server.http as http:
        found = events(http.post("/v1/tts/stream/with-timestamp", json={"text": TEXT, "format": "pcm"}))
    # How many chunks share a message depends on how fast the client reads.
    timed = [event for event in found if event["alignment"] is not None]
    assert [event["chunk_seq"] for event in timed] == list(range(len(timed)))
    assert " ".join(event["content"] for event in timed) == TEXT
    assert starts_of(timed) == {"It": 0.1, "costs": 0.6, "$12.50": 1.1, "now.": 1.6}
    assert all(event["alignment"]["segments"][0]["start"] == 0 for event in timed)
    segments = [segment for event in timed for segment in event["alignment"]["segments"]]
    assert [TEXT[segment["first"] : segment["last"]] for segment in segments] == TEXT.split()
    last = timed[-1]["alignment"]
    assert last["audio_duration"] == last["segments"][-1]["end"]
    audio = b"".join(base64.b64decode(event["audio_base64"]) for event in found)
    assert len(audio) == 2 * 2 * RATE


def starts_of(messages: list[dict[str, Any]]) -> dict[str, float]:
    """Return the second at which each word starts, from the alignments of Fish's messages."""
    return {
        segment["text"]: round(message["chunk_audio_offset_sec"] + segment["start"], 3)
        for message in messages
        if message["alignment"] is not None
        for segment in message["alignment"]["segments"]
    }


def test_the_live_socket_counts_over_all_sentences(server: FakeServer) -> None:
    with server.connect("/v1/tts/live/with-timestamp") as socket:
        for event in (
            {"event": "start", "request": {"text": "", "format": "pcm"}},
            {"event": "text", "text": "One two. "},
            {"event": "text", "text": "Three four. "},
            {"event": "stop"},
        ):
            socket.send(ormsgpack.packb(event))
        found = []
        while (message := ormsgpack.unpackb(socket.recv(timeout=240)))["event"] != "finish":
            found.append(message)
    assert starts_of(found) == {"One": 0.1, "two.": 0.6, "Three": 1.1, "four.": 1.6}


def test_elevenlabs_responses_have_the_times_of_characters(server: FakeServer) -> None:
    path = "/v1/text-to-speech/alloy"
    with server.http as http:
        query = {"output_format": "pcm_16000"}
        whole = http.post(f"{path}/with-timestamps", json={"text": TEXT}, params=query).json()
        lines = http.post(f"{path}/stream/with-timestamps", json={"text": TEXT}, params=query).text.splitlines()
        plain = http.post(path, json={"text": TEXT}, params=query)
    alignment = whole["alignment"]
    assert "".join(alignment["characters"]) == TEXT + " "
    starts, ends = alignment["character_start_times_seconds"], alignment["character_end_times_seconds"]
    assert len(starts) == len(ends) == len(alignment["characters"])
    assert (starts[0], ends[1], starts[9]) == (0.1, 0.5, 1.1)
    assert all(start <= end for start, end in zip(starts, ends, strict=True))
    parts = [json.loads(line)["alignment"] for line in lines]
    assert [each for part in parts if part for each in part["characters"]] == alignment["characters"]
    assert [each for part in parts if part for each in part["character_start_times_seconds"]] == starts
    assert plain.status_code == 200


def spoken_on(socket: ClientConnection, final: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    for message in messages:
        socket.send(json.dumps(message))
    found = []
    while not (message := json.loads(socket.recv(timeout=240))).get(final):
        found.append(message)
    return [each for each in found if each["alignment"] is not None]


SPEECH = ({"text": " "}, {"text": "One two three. "}, {"text": ""})


@pytest.mark.parametrize(("query", "begins"), [("", [100, 600, 100]), ("&sync_alignment=true", [100, 600, 1100])])
def test_elevenlabs_sockets_count_from_the_alignment_before_or_from_the_start(
    server: FakeServer, query: str, begins: list[int]
) -> None:
    with server.connect(f"/v1/text-to-speech/alloy/stream-input?output_format=pcm_16000{query}") as socket:
        found = [each["alignment"] for each in spoken_on(socket, "isFinal", *SPEECH)]
    characters = [character for each in found for character in each["chars"]]
    times = [time for each in found for time in each["charStartTimesMs"]]
    durations = [time for each in found for time in each["charDurationsMs"]]
    assert "".join(characters) == "One two three. "
    assert [times[place] for place in (0, 4, 8)] == begins
    assert sum(durations) == pytest.approx(1200, abs=6)


def test_the_elevenlabs_dialogue_socket_counts_from_the_audio_of_its_own_message(server: FakeServer) -> None:
    line = {"context_id": "a", "inputs": [{"text": "One two three. ", "voice_id": "alloy"}], "flush": True}
    close = {"context_id": "a", "close_context": True}
    with server.connect("/v1/text-to-dialogue/multi-stream-input?output_format=pcm_16000") as socket:
        found = spoken_on(socket, "is_final", line, line, close)
    starts = [each["alignment"]["char_start_times_ms"][0] for each in found]
    text = "".join(character for each in found for character in each["alignment"]["chars"])
    assert (text, starts) == ("One two three. One two three. ", [100, 100, 100, 100])


def test_lines_of_a_batch_have_subtitles_beside_their_audio(tmp_path: Path) -> None:
    raw = json.dumps({"text": TEXT, "subtitles": "srt", "prosody": {"speed": 2.0}}).encode()
    body, digest = parse_line(raw, LineDefaults("nano"))
    speaker = LineSpeaker(handle(tmp_path / "voices"), tmp_path, LineDefaults("nano"))
    entry = asyncio.run(speaker.speak(LineTask(1, "a.b", digest, 0, len(raw)), raw))
    assert (entry.status, entry.error, body.subtitles) == ("done", None, "srt")
    assert (tmp_path / "a.b.srt").read_text() == "1\n00:00:00,050 --> 00:00:01,000\nIt costs $12.50 now.\n"
    assert (tmp_path / "a.b.wav").is_file()
