"""The requests of Open WebUI with the engine OpenAI, and of relatives that list voices the same way."""

import importlib.util

import httpx
import pytest

from tests.clients.conftest import KEY
from tests.nano import DEFAULT_VOICE, OTHER_VOICE, TITLES
from tests.server.conftest import Serving


@pytest.fixture
def http(nano: Serving) -> httpx.Client:
    return nano.client(authorization=f"Bearer {KEY}")


def test_the_settings_page_lists_voices_and_models(http: httpx.Client) -> None:
    voices = http.get("/v1/audio/voices").json()["voices"]
    assert TITLES.items() <= {voice["id"]: voice["name"] for voice in voices}.items()
    assert [model["id"] for model in http.get("/v1/audio/models").json()["models"]][:2] == ["nano", "tts-1"]


def test_an_answer_is_read_aloud(http: httpx.Client) -> None:
    headers = {"X-OpenWebUI-User-Name": "alice", "X-OpenWebUI-User-Role": "user"}
    body = {"input": "Good morning.", "voice": OTHER_VOICE, "model": "tts-1"}
    answer = http.post("/v1/audio/speech", json=body, headers=headers)
    assert answer.headers["content-type"] == "audio/mpeg"
    assert len(answer.content) > 4_000


@pytest.mark.skipif(importlib.util.find_spec("moonshine_voice") is None, reason="needs moonshine-voice, the extra asr")
def test_a_recording_without_a_transcript_gets_one(http: httpx.Client, nano: Serving) -> None:
    body = {"input": "The tide is coming in.", "voice": DEFAULT_VOICE, "response_format": "wav", "seed": 1}
    audio = http.post("/v1/audio/speech", json=body | {"model": "tts-1"}).content
    answer = http.post("/v1/audio/voices", data={"name": "heard"}, files={"audio_sample": ("a.wav", audio)})
    assert answer.status_code == 200, answer.text
    (transcript,) = (nano.voices / "heard").glob("*.lab")
    words = transcript.read_text().lower()
    assert sum(word in words for word in ("the", "tide", "is", "coming", "in")) >= 3
    http.delete("/v1/audio/voices/heard")
