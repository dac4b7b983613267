"""OpenAI's API with the published client."""

from __future__ import annotations

import base64
import io
import json
from typing import get_args

import httpx
import numpy as np
import pytest

from shoal.audio.decode import AudioLimits, read_audio
from tests.lazy import LazyModule
from tests.server.conftest import Serving

openai = LazyModule("openai")
SHORT = {"max_new_tokens": 12, "seed": 5}
LONG = SHORT | {"max_new_tokens": 60}  # without a seed, random weights may end at once
ANY_LENGTH = AudioLimits(min_seconds=0.0)


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    return openai.OpenAI(api_key="any", base_url=f"{server.url}/v1", max_retries=0, http_client=server.client())


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac", "wav"])
def test_the_client_speaks_in_every_format(client: openai.OpenAI, format: str) -> None:
    answer = client.audio.speech.create(
        model="tts-1", voice="alloy", input="Hello there.", response_format=format, extra_body=SHORT
    )
    assert read_audio(answer.content, 16_000, ANY_LENGTH).seconds == pytest.approx(0.48, abs=0.15)


def test_the_client_streams(client: openai.OpenAI) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input="Hello there.", response_format="wav", extra_body=LONG
    ) as answer:
        pieces = list(answer.iter_bytes(1024))
    assert len(pieces) > 10
    assert b"".join(pieces).startswith(b"RIFF")


def test_pcm_has_openais_sample_rate(http: httpx.Client) -> None:
    body = {"model": "tts-1", "voice": "alloy", "input": "Hello there.", "response_format": "pcm", **SHORT}
    answer = http.post("/v1/audio/speech", json=body)
    assert answer.headers["x-sample-rate"] == "24000"
    assert len(answer.content) == pytest.approx(0.48 * 24_000 * 2, rel=0.01)
    assert len(http.post("/v1/audio/speech", json={**body, "sample_rate": 16_000}).content) == 0.48 * 16_000 * 2


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.5, 4.0])
def test_speed_changes_the_duration(client: openai.OpenAI, speed: float) -> None:
    answer = client.audio.speech.create(
        model="tts-1",
        voice="alloy",
        input="Hello there.",
        response_format="wav",
        speed=speed,
        extra_body={"max_new_tokens": 50, "seed": 3},
    )
    assert read_audio(answer.content, 16_000, ANY_LENGTH).seconds == pytest.approx(2.0 / speed, rel=0.1, abs=0.1)


def test_a_null_is_a_field_that_is_not_set(http: httpx.Client) -> None:
    body = {"model": "tts-1", "voice": "alloy", "input": "Hello there.", **SHORT}
    unset = dict.fromkeys(("response_format", "speed", "stream_format", "instructions", "normalize", "lexicon", "user"))
    answer = http.post("/v1/audio/speech", json=body | unset)
    assert (answer.status_code, answer.content) == (200, http.post("/v1/audio/speech", json=body).content)
    assert http.post("/v1/audio/speech", json=body | {"input": None}).status_code == 422


@pytest.mark.parametrize(
    ("voice", "message"),
    [
        ("af_bella+af_sky", "a voice name has letters"),
        ("x" * 256, "a voice name has letters"),
        (5, "send the name of a voice"),
        (None, "voice: Field required"),
    ],
)
def test_a_wrong_voice_is_an_error_that_names_the_field(http: httpx.Client, voice: object, message: str) -> None:
    answer = http.post("/v1/audio/speech", json={"model": "tts-1", "voice": voice, "input": "Hi."})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], message in error["message"]) == (422, "voice", True)


def test_every_speech_model_of_openai_is_a_name_of_the_loaded_one(client: openai.OpenAI) -> None:
    from openai.types.audio import SpeechModel

    names = get_args(SpeechModel)
    assert "gpt-4o-mini-tts-2025-12-15" in names
    assert set(names) <= {model.id for model in client.models.list()}


@pytest.mark.parametrize("route", ["/v1/audio/speech", "/invocations"])
def test_events_carry_the_same_audio(http: httpx.Client, route: str) -> None:
    body = {"model": "tts-1", "voice": "alloy", "input": "Hello there.", "response_format": "pcm", **SHORT}
    plain = http.post(route, json=body)
    with http.stream("POST", route, json={**body, "stream_format": "sse"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-disposition" not in answer.headers  # events are no file of audio
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    audio = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    samples, event_samples = np.frombuffer(plain.content, "<i2").astype(int), np.frombuffer(audio, "<i2").astype(int)
    assert len(samples) == len(event_samples)
    assert np.abs(samples - event_samples).max() <= 1  # chunk boundaries depend on timing
    assert events[-1]["type"] == "speech.audio.done"
    assert events[-1]["usage"] == {"input_tokens": 12, "output_tokens": 12, "total_tokens": 24}


def test_a_stored_voice_is_found_by_name_and_by_object(
    http: httpx.Client, client: openai.OpenAI, recording: bytes
) -> None:
    http.post("/v1/references/add", data={"id": "mine", "text": "Spoken."}, files={"audio": ("a.wav", recording)})
    named = client.audio.speech.create(model="tts-1", voice="mine", input="Hello.", extra_body=SHORT)
    by_id = client.audio.speech.create(model="tts-1", voice={"id": "mine"}, input="Hello.", extra_body=SHORT)
    default = client.audio.speech.create(model="tts-1", voice="alloy", input="Hello.", extra_body=SHORT)
    assert named.content == by_id.content != default.content
    http.request("DELETE", "/v1/references/delete", json={"reference_id": "mine"})


def test_the_client_understands_our_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no voice"):
        client.audio.speech.create(model="tts-1", voice="nobody", input="Hello.")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        client.audio.speech.create(model="gpt-9", voice="alloy", input="Hello.")
    with pytest.raises(openai.UnprocessableEntityError, match="follows no instructions") as refused:
        client.audio.speech.create(model="tts-1", voice="alloy", input="Hello.", instructions="Sing.")
    assert refused.value.param == "instructions"
    with pytest.raises(openai.BadRequestError):
        client.audio.speech.create(model="tts-1", voice="alloy", input="x" * 20_000)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()][:2] == ["random:tiny", "tts-1"]
    assert client.models.retrieve("random:tiny").id == "random:tiny"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        client.models.retrieve("gpt-9")


def test_sagemaker_accepts_both_bodies(http: httpx.Client) -> None:
    assert http.get("/ping").status_code == 200
    fish = http.post("/invocations", json={"text": "Hello.", **SHORT, "streaming": True})
    assert read_audio(io.BytesIO(fish.content), 16_000, ANY_LENGTH).seconds > 0.1
    theirs = {"model": "tts-1", "voice": "alloy", "input": "Hello.", "response_format": "wav", **SHORT}
    assert http.post("/invocations", json=theirs).content.startswith(b"RIFF")
    assert http.post("/invocations", json={**theirs, "text": "Hello."}).status_code == 422
    assert http.post("/invocations", json={}).status_code == 422
