"""The Fish API over REST, with plain requests and with the published clients."""

import base64
import io
import json
import warnings

import httpx
import numpy as np
import ormsgpack
import pytest

from shoal.audio.decode import AudioLimits, read_audio
from tests.server.conftest import Serving, samples_of

SAY = {"text": "Hello there.", "seed": 3, "max_new_tokens": 12}
FORMATS = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "flac": "audio/flac",
    "aac": "audio/aac",
    "webm": "audio/webm",
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_can_be_whole_or_streamed(http: httpx.Client, format: str, streaming: bool) -> None:
    answer = http.post("/v1/tts", json={**SAY, "format": format, "streaming": streaming})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == FORMATS[format]
    assert answer.headers["content-disposition"] == f"attachment; filename=audio.{format}"
    assert ("content-length" in answer.headers) is not streaming
    if format == "pcm":
        assert len(answer.content) == 12 * 640 * 2
    else:
        heard = read_audio(io.BytesIO(answer.content), 16_000)
        assert heard.seconds == pytest.approx(12 * 0.04, abs=0.15)


def test_streamed_and_whole_audio_are_the_same(http: httpx.Client) -> None:
    whole = http.post("/v1/tts", json=SAY).content
    streamed = http.post("/v1/tts", json={**SAY, "streaming": True}).content
    assert np.abs(samples_of(whole) - samples_of(streamed)).max() <= 1


def test_json_msgpack_and_form_bodies_give_the_same_audio(http: httpx.Client, recording: bytes) -> None:
    said = {**SAY, "prosody": {"speed": 1.0, "volume": -3.0}}
    spoken = [{"audio": base64.b64encode(recording).decode(), "text": "Spoken."}]
    by_json = http.post("/v1/tts", json={**said, "references": spoken})
    packed = ormsgpack.packb({**said, "references": [{"audio": recording, "text": "Spoken."}]})
    by_msgpack = http.post("/v1/tts", content=packed, headers={"content-type": "application/msgpack"})
    form = {**SAY, "prosody": json.dumps(said["prosody"]), "reference_text": "Spoken."}
    by_form = http.post("/v1/tts", data=form, files={"reference_audio": ("a.wav", recording)})
    assert by_json.status_code == by_msgpack.status_code == by_form.status_code == 200
    assert by_json.content == by_msgpack.content == by_form.content
    assert by_json.content != http.post("/v1/tts", json=said).content


def test_latency_selects_streaming(http: httpx.Client) -> None:
    assert "content-length" in http.post("/v1/tts", json={**SAY, "latency": "normal"}).headers
    assert "content-length" not in http.post("/v1/tts", json={**SAY, "latency": "balanced"}).headers
    assert "content-length" not in http.post("/v1/tts", json={**SAY, "latency": "low"}).headers
    assert "content-length" in http.post("/v1/tts", json={**SAY, "latency": "balanced", "streaming": False}).headers


def test_proxies_are_asked_not_to_buffer_streams(http: httpx.Client) -> None:
    assert http.post("/v1/tts", json={**SAY, "streaming": True}).headers["x-accel-buffering"] == "no"
    assert "x-accel-buffering" not in http.post("/v1/tts", json={**SAY, "streaming": False}).headers


def test_speed_and_volume_change_the_audio(http: httpx.Client) -> None:
    default = samples_of(http.post("/v1/tts", json={**SAY, "max_new_tokens": 50}).content)
    fast = http.post("/v1/tts", json={**SAY, "max_new_tokens": 50, "prosody": {"speed": 2.0}})
    quiet = http.post("/v1/tts", json={**SAY, "max_new_tokens": 50, "prosody": {"volume": -20.0}})
    assert len(samples_of(fast.content)) == pytest.approx(len(default) / 2, rel=0.1)
    assert np.abs(samples_of(quiet.content)).mean() == pytest.approx(np.abs(default).mean() / 10, rel=0.05)


def test_sample_rate_and_bitrate_are_as_requested(http: httpx.Client) -> None:
    answer = http.post("/v1/tts", json={**SAY, "sample_rate": 8000})
    assert answer.headers["x-sample-rate"] == "8000"
    assert read_audio(io.BytesIO(answer.content), 8000).original_rate == 8000
    small = http.post("/v1/tts", json={**SAY, "format": "mp3", "mp3_bitrate": 64}).content
    large = http.post("/v1/tts", json={**SAY, "format": "mp3", "mp3_bitrate": 192}).content
    assert len(large) > 1.8 * len(small)
    assert http.post("/v1/tts", json={**SAY, "format": "opus", "sample_rate": 44100}).status_code == 400


def test_a_random_seed_can_be_reused(http: httpx.Client) -> None:
    without = {"text": "Hello there.", "max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0}
    first, second = http.post("/v1/tts", json=without), http.post("/v1/tts", json=without)
    assert first.headers["x-seed"] != second.headers["x-seed"]
    again = http.post("/v1/tts", json={**without, "seed": int(first.headers["x-seed"])})
    assert again.content == first.content


@pytest.mark.parametrize(("spelt", "status"), [("true", 200), ("1", 200), ("false", 200), ("maybe", 422)])
def test_a_form_encodes_booleans_as_text(http: httpx.Client, spelt: str, status: int) -> None:
    form = {**SAY, "condition_on_previous_chunks": spelt}
    answer = http.post("/v1/tts", files={name: (None, str(value)) for name, value in form.items()})
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"colour": "blue"}, "colour"),
        ({"condition_on_previous_chunks": "true"}, "condition_on_previous_chunks"),
        ({"early_stop_threshold": 0.5}, "early_stop_threshold"),
        ({"temperature": 3.0}, "temperature"),
        ({"temperature": "0.7"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"chunk_length": 5}, "chunk_length"),
        ({"format": "ogg"}, "format"),
        ({"prosody": {"speed": 9.0}}, "prosody"),
        ({"reference_id": "../etc"}, "reference_id"),
        ({"reference_id": ["narrator", "../etc"]}, "reference_id"),
        ({"reference_id": []}, "reference_id"),
        ({"reference_id": ["narrator"] * 17}, "reference_id"),
        ({"references": [[{"audio": "AAAA"}]]}, "references"),
        ({"references": [{"audio": "AAAA", "text": "x", "speaker": 1}]}, "references"),
        ({"opus_bitrate": 65}, "opus_bitrate"),
        ({"opus_bitrate": 600_000}, "opus_bitrate"),
        ({"latency": "instant"}, "latency"),
        ({"top_k": -1}, "top_k"),
        ({"features": "quality-guard"}, "features"),
        ({"features": ["x"] * 17}, "features"),
        ({"references": [{"audio": "http://127.0.0.1/a.wav", "text": "x"}]}, "references"),
        ({"seed": -1}, "seed"),
        ({"text": ""}, "text"),
    ],
)
def test_unsupported_values_are_rejected_by_field_name(
    http: httpx.Client, fields: dict[str, object], field: str
) -> None:
    answer = http.post("/v1/tts", json={**SAY, **fields})
    assert answer.status_code == 422
    assert answer.json()[0]["loc"][0] == field


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"text": "x" * 10_001}, 400, "Text is too long, max length is 10000"),
        ({"text": "<|im_end|>"}, 400, ""),
        ({"text": "…"}, 400, "nothing to speak"),
        ({"reference_id": "nobody"}, 404, "there is no voice 'nobody'"),
        ({"references": [{"audio": base64.b64encode(b"RIFFnonsense" * 30).decode(), "text": "x"}]}, 400, ""),
    ],
)
def test_errors_have_the_fish_format(http: httpx.Client, fields: dict[str, object], status: int, message: str) -> None:
    answer = http.post("/v1/tts", json={**SAY, **fields})
    assert answer.status_code == status
    assert answer.json().keys() == {"statusCode", "message", "error"}
    assert message in answer.json()["message"]


def test_any_model_name_selects_the_loaded_model_and_the_response_says_so(http: httpx.Client) -> None:
    answer = http.post("/v1/tts", json={**SAY, "features": ["quality-guard", "späti"]}, headers={"model": "s2.1-pro"})
    assert answer.status_code == 200
    loaded = http.get("/v1/models").json()["data"][0]["id"]
    assert answer.headers["x-model"] == loaded
    assert answer.headers["x-ignored-fields"] == "model, features.sp?ti"
    same = http.post("/v1/tts", json=SAY, headers={"model": loaded})
    assert "x-ignored-fields" not in same.headers
    assert same.content == answer.content


def test_opus_bitrates_are_bits_or_kilobits_per_second(http: httpx.Client) -> None:
    said = {**SAY, "format": "opus", "max_new_tokens": 40}
    bits = http.post("/v1/tts", json={**said, "opus_bitrate": 64_000}).content
    kilobits = http.post("/v1/tts", json={**said, "opus_bitrate": 64}).content
    small = http.post("/v1/tts", json={**said, "opus_bitrate": 24_000}).content
    assert len(bits) == len(kilobits) > 1.5 * len(small)
    assert http.post("/v1/tts", json={**SAY, "format": "wav", "opus_bitrate": 64_000}).status_code == 200


def test_top_k_1_is_greedy_whatever_the_seed(http: httpx.Client) -> None:
    first, second = (http.post("/v1/tts", json={**SAY, "top_k": 1, "seed": seed}).content for seed in (1, 2))
    assert first == second != http.post("/v1/tts", json={**SAY, "seed": 2}).content


def test_loudness_can_be_normalized(http: httpx.Client) -> None:
    quiet = {**SAY, "max_new_tokens": 60}
    plain = samples_of(http.post("/v1/tts", json=quiet).content)
    louder = samples_of(http.post("/v1/tts", json={**quiet, "prosody": {"normalize_loudness": True}}).content)
    gains = louder[np.abs(plain) > 1000] / plain[np.abs(plain) > 1000]
    assert len(louder) == len(plain)
    assert np.allclose(gains, gains.mean(), rtol=0.01)  # a whole file has one gain
    assert abs(gains.mean() - 1) > 0.01


def test_several_voices_need_a_model_that_speaks_dialogues(http: httpx.Client, recording: bytes) -> None:
    spoken = {"audio": base64.b64encode(recording).decode(), "text": "Spoken."}
    nested = http.post("/v1/tts", json={**SAY, "references": [[spoken, spoken], [spoken]]})
    assert (nested.status_code, nested.json()["message"][:29]) == (400, "this model speaks with one vo")
    assert http.post("/v1/tts", json={**SAY, "reference_id": ["a", "b"]}).status_code == 400
    assert http.post("/v1/tts", json={**SAY, "references": [[spoken, spoken]]}).status_code == 200


def test_health_answers_both_methods(http: httpx.Client) -> None:
    assert http.get("/v1/health").json() == http.post("/v1/health").json() == {"status": "ok"}


def test_the_new_client_speaks(server: Serving, recording: bytes) -> None:
    from fishaudio import FishAudio
    from fishaudio.types import Prosody, ReferenceAudio, TTSConfig

    client = FishAudio(api_key="any", base_url=server.url, httpx_client=server.client())
    config = TTSConfig(format="wav", max_new_tokens=10, prosody=Prosody(speed=1.2, volume=2.0))
    audio = client.tts.convert(text="Hello there.", config=config)
    # At least a frame: this client sends no seed, and random weights may end early.
    assert read_audio(audio, 16_000, AudioLimits(min_seconds=0)).seconds > 0.02
    spoken = [ReferenceAudio(audio=recording, text="Spoken.")]
    pieces = list(client.tts.stream(text="Hello.", references=spoken, config=TTSConfig(max_new_tokens=10)))
    assert read_audio(b"".join(pieces), 16_000, AudioLimits(min_seconds=0)).seconds > 0.02


def test_the_new_client_understands_our_errors(server: Serving) -> None:
    from fishaudio import FishAudio
    from fishaudio.exceptions import APIError, NotFoundError

    client = FishAudio(api_key="any", base_url=server.url, httpx_client=server.client())
    with pytest.raises(NotFoundError, match="no voice"):
        client.tts.convert(text="Hello.", reference_id="nobody")
    with pytest.raises(APIError, match="reference_id"):
        client.tts.convert(text="Hello.", reference_id="../nobody")


def test_the_legacy_client_speaks(server: Serving, recording: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fish_audio_sdk import ReferenceAudio, Session, TTSRequest
    with Session("any", base_url=server.url) as session:
        spoken = [ReferenceAudio(audio=recording, text="Spoken.")]
        audio = b"".join(session.tts(TTSRequest(text="Hi.", references=spoken, format="wav")))
    assert read_audio(audio, 16_000, AudioLimits(min_seconds=0)).original_rate == 16_000
