"""Voices as objects, with OpenAI's published client and with Open WebUI's requests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shoal.api.config import Limits, ServerConfig
from shoal.api.engine_client import EngineHandle, EngineLifecycle
from shoal.api.state import create_state
from shoal.voices.store import VoiceStore
from tests.lazy import LazyModule
from tests.server.conftest import Serving
from tests.server.standin import Standin, listening

openai = LazyModule("openai")
SHORT = {"max_new_tokens": 12, "seed": 5}
KEY = "a-key-of-the-tests"


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    return openai.OpenAI(api_key="any", base_url=f"{server.url}/v1", max_retries=0, http_client=server.client())


@pytest.fixture
def name(http: httpx.Client) -> Iterator[str]:
    """The name of a voice that is deleted after the test."""
    yield "object"
    http.delete("/v1/audio/voices/object")


def test_a_recording_becomes_a_voice(client: openai.OpenAI, http: httpx.Client, recording: bytes, name: str) -> None:
    files = {"audio_sample": ("a.wav", recording, "audio/wav")}
    created = http.post("/v1/audio/voices", data={"name": name, "text": "La la la.", "consent": "c"}, files=files)
    assert created.status_code == 200
    assert created.json() | {"created_at": 0} == {
        "id": name, "object": "audio.voice", "name": name, "created_at": 0, "type": "audio_sample",
        "description": "", "gender": "", "accent": "",
    }  # fmt: skip
    assert created.json()["created_at"] > 1_700_000_000
    assert created.json() == http.get(f"/v1/audio/voices/{name}").json()
    assert client.audio.speech.create(model="tts-1", voice=name, input="Hello.", extra_body=SHORT).content
    listed = http.get("/v1/audio/voices").json()
    assert created.json() in listed["data"]
    assert created.json() in listed["voices"]
    again = http.post("/v1/audio/voices", data={"name": name, "text": "La."}, files=files)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "voice_exists")
    deleted = client.audio.voices.delete(name)
    assert (deleted.id, deleted.deleted) == (name, True)
    with pytest.raises(openai.NotFoundError):
        client.audio.voices.delete(name)


def test_the_voice_of_finished_speech_can_be_kept(http: httpx.Client, name: str) -> None:
    body = {"model": "tts-1", "voice": "alloy", "input": "Hello there.", "seed": 3, "max_new_tokens": 50}
    spoken = http.post("/v1/audio/speech", json=body)
    keep = {"name": name, "request_id": spoken.headers["x-request-id"]}
    assert http.post("/v1/audio/voices", json=keep).status_code == 200
    said = {"model": "tts-1", "voice": name, "input": "Hello.", "response_format": "pcm", **SHORT}
    with_voice = http.post("/v1/audio/speech", json=said).content
    assert with_voice != http.post("/v1/audio/speech", json=said | {"voice": "alloy"}).content
    missing = http.post("/v1/audio/voices", json=keep | {"request_id": "unknown"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "speech_not_kept")


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"name": "../x", "text": "La."}, 422), ({"text": "La."}, 422), ({"name": "x", "txt": "La."}, 422),
     ({"name": "x", "text": "La.", "type": "prompt"}, 422), ({"name": "x", "text": "<|im_end|>"}, 400)],
)  # fmt: skip
def test_an_invalid_voice_is_refused(http: httpx.Client, recording: bytes, fields: dict[str, str], status: int) -> None:
    answer = http.post("/v1/audio/voices", data=fields, files={"audio_sample": ("a.wav", recording)})
    assert (answer.status_code, "error" in answer.json()) == (status, True)


def test_elevenlabs_clients_add_and_delete_voices(http: httpx.Client, recording: bytes, name: str) -> None:
    files = [("files", ("a.wav", recording))]
    added = http.post("/v1/voices/add", data={"name": name, "text": "La la la.", "description": "d"}, files=files)
    assert added.json() == {"voice_id": name, "requires_verification": False}
    assert http.get(f"/v1/voices/{name}").json()["category"] == "cloned"
    assert http.delete(f"/v1/voices/{name}").json() == {"status": "ok"}
    none = http.post("/v1/voices/add", data={"name": name}, files=[("description", (None, "d"))])
    assert (none.status_code, none.json()["detail"][0]["loc"]) == (422, ["files"])


def test_without_a_transcript_and_a_recogniser_the_error_names_both(
    tmp_path: Path, recording: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "moonshine_voice" else find_spec(name, *rest)
    )
    config = ServerConfig(api_keys=(KEY,), public_voices=True, limits=Limits())
    engine = EngineHandle(Standin(), VoiceStore(tmp_path), 25.0)
    with listening(create_state(config, EngineLifecycle(lambda: engine, engine), 4)) as port:
        http = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False, timeout=240)
        with http:
            files = {"audio_sample": ("a.wav", recording)}
            key = {"authorization": f"Bearer {KEY}"}
            refused = http.post("/v1/audio/voices", data={"name": "x"}, files=files, headers=key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (501, "missing_extra")
            assert "send it as `text`, or: " in refused.json()["error"]["message"]
            assert "shoal-tts[asr]" in refused.json()["error"]["message"]
            # With `public_voices` only the lists need no key.
            assert [http.get(f"/v1/audio/{list}").status_code for list in ("voices", "models")] == [200, 200]
            assert http.post("/v1/audio/voices", json={"name": "x", "request_id": "y"}).status_code == 401
            assert http.delete("/v1/audio/voices/x").status_code == 401
            assert http.get("/v1/voices").status_code == 401
