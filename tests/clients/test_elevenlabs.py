"""ElevenLabs' API with the published client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from shoal.audio.decode import AudioLimits, read_audio
from tests.clients.conftest import KEY
from tests.lazy import LazyModule
from tests.nano import DEFAULT_VOICE, OTHER_VOICE, PCM_BYTES_PER_SECOND, SAMPLE_RATE, TITLES, is_plausible
from tests.server.conftest import Serving

elevenlabs = LazyModule("elevenlabs")
TEXT = "Good morning."
ANY_LENGTH = AudioLimits(min_seconds=0.0)
SEED = 7
PCM = f"pcm_{SAMPLE_RATE}"


@pytest.fixture(scope="module")
def client(nano: Serving) -> Iterator[elevenlabs.ElevenLabs]:
    with httpx.Client(trust_env=False, verify=False, timeout=240) as http:
        yield elevenlabs.ElevenLabs(base_url=nano.url, api_key=KEY, httpx_client=http)


@pytest.fixture(scope="module")
def spoken(client: elevenlabs.ElevenLabs) -> bytes:
    """Return the text as 16-bit samples at nano's own rate."""
    return b"".join(client.text_to_speech.convert(OTHER_VOICE, text=TEXT, output_format=PCM, seed=SEED))


@pytest.mark.parametrize("format", ["mp3_44100_128", "mp3_22050_32", "opus_48000_64", "wav_24000"])
def test_convert_returns_a_file_in_the_chosen_format(client: elevenlabs.ElevenLabs, spoken: bytes, format: str) -> None:
    audio = b"".join(client.text_to_speech.convert(OTHER_VOICE, text=TEXT, output_format=format, seed=SEED))
    seconds = read_audio(audio, SAMPLE_RATE, ANY_LENGTH).seconds
    assert seconds == pytest.approx(len(spoken) / PCM_BYTES_PER_SECOND, abs=0.15)


@pytest.mark.parametrize(
    ("format", "bytes_per_second"), [("ulaw_8000", 8_000), ("alaw_8000", 8_000), ("pcm_22050", 44_100)]
)
def test_headerless_formats_have_their_size(
    client: elevenlabs.ElevenLabs, spoken: bytes, format: str, bytes_per_second: int
) -> None:
    audio = b"".join(client.text_to_speech.stream(OTHER_VOICE, text=TEXT, output_format=format, seed=SEED))
    assert len(audio) / bytes_per_second == pytest.approx(len(spoken) / PCM_BYTES_PER_SECOND, rel=0.01)


def test_a_stream_has_the_samples_of_the_file(client: elevenlabs.ElevenLabs, spoken: bytes) -> None:
    pieces = list(client.text_to_speech.stream(OTHER_VOICE, text=TEXT, output_format=PCM, seed=SEED))
    assert len(b"".join(pieces)) == len(spoken)
    assert len(pieces) > 1


def test_both_routes_with_timestamps_carry_the_same_audio(client: elevenlabs.ElevenLabs, spoken: bytes) -> None:
    said = {"text": TEXT, "output_format": PCM, "seed": SEED}
    whole = client.text_to_speech.convert_with_timestamps(OTHER_VOICE, **said)
    assert base64.b64decode(whole.audio_base_64) == spoken
    assert "".join(whole.alignment.characters).split() == TEXT.split()
    assert whole.alignment.character_end_times_seconds[-1] <= len(spoken) / PCM_BYTES_PER_SECOND + 0.1
    chunks = list(client.text_to_speech.stream_with_timestamps(OTHER_VOICE, **said))
    assert len(b"".join(base64.b64decode(chunk.audio_base_64) for chunk in chunks)) == len(spoken)


@pytest.mark.filterwarnings("ignore:ConnectionClosed.code is deprecated:DeprecationWarning")
def test_text_that_is_still_written_is_spoken(
    client: elevenlabs.ElevenLabs, nano: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client always dials with TLS, which a proxy provides; here only its address is changed."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(client.text_to_speech, "_ws_base_url", nano.url.replace("http", "ws"))
    words = ("The tide ", "is coming in. ", "It is going out.")
    audio = b"".join(client.text_to_speech.convert_realtime(OTHER_VOICE, text=iter(words), output_format=PCM))
    assert is_plausible(len(audio) / PCM_BYTES_PER_SECOND, "".join(words))
    with pytest.raises(InvalidStatus, match="404"):
        list(client.text_to_speech.convert_realtime("nobody", text=iter(words)))


def test_speed_has_an_effect_and_other_settings_are_named_as_ignored(
    client: elevenlabs.ElevenLabs, spoken: bytes
) -> None:
    settings = elevenlabs.VoiceSettings(stability=0.5, similarity_boost=0.7, speed=2.0)
    with client.text_to_speech.with_raw_response.convert(
        OTHER_VOICE, text=TEXT, output_format=PCM, seed=SEED, voice_settings=settings, model_id="eleven_flash_v2_5"
    ) as answer:
        audio = b"".join(answer.data)
    assert len(audio) == pytest.approx(len(spoken) / 2, rel=0.1)
    assert answer.headers["x-ignored-fields"] == "model_id, voice_settings.stability, voice_settings.similarity_boost"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_a_dialogue_of_one_voice_is_spoken_and_one_of_two_needs_another_model(client: elevenlabs.ElevenLabs) -> None:
    line = elevenlabs.DialogueInput(text="Good morning.", voice_id=OTHER_VOICE)
    audio = b"".join(client.text_to_dialogue.stream(inputs=[line, line], output_format=PCM, seed=SEED))
    assert is_plausible(len(audio) / PCM_BYTES_PER_SECOND, 2 * line.text)
    with pytest.raises(elevenlabs.core.ApiError) as refused:
        list(
            client.text_to_dialogue.convert(
                inputs=[line, elevenlabs.DialogueInput(text="Hello.", voice_id=DEFAULT_VOICE)]
            )
        )
    assert (refused.value.status_code, "S2 model" in refused.value.body["detail"]["message"]) == (400, True)


def test_voices_and_models_are_listed(client: elevenlabs.ElevenLabs) -> None:
    voices = {voice.voice_id: voice for voice in client.voices.get_all().voices}
    assert voices[OTHER_VOICE].category == "premade"
    assert {voice.voice_id for voice in client.voices.search().voices} == voices.keys()
    assert client.voices.get(OTHER_VOICE).name == TITLES[OTHER_VOICE]
    assert [(model.model_id, model.can_do_text_to_speech) for model in client.models.list()] == [("nano", True)]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"search": "IMOGEN"}, ["imogen"]),
        ({"search": "nobody"}, []),
        ({"voice_ids": ["otis", "imogen", "x"], "page_size": 1}, ["imogen", "otis"]),
        ({"voice_ids": "otis", "category": "cloned"}, []),
        ({"search": "imogen", "gender": "male"}, []),
        ({"search": "imogen", "gender": "female", "accent": "british", "category": "premade"}, ["imogen"]),
    ],
)
def test_voices_are_found_by_the_fields_of_a_query(
    client: elevenlabs.ElevenLabs, query: dict[str, Any], found: list[str]
) -> None:
    assert [voice.voice_id for voice in client.voices.search(**query).voices] == found


def test_the_client_understands_our_errors(client: elevenlabs.ElevenLabs, nano: Serving) -> None:
    with pytest.raises(elevenlabs.core.ApiError) as unknown:
        list(client.text_to_speech.convert("nobody", text=TEXT))
    assert (unknown.value.status_code, unknown.value.body["detail"]["status"]) == (404, "voice_not_found")
    with pytest.raises(elevenlabs.UnprocessableEntityError) as empty:
        list(client.text_to_speech.convert(OTHER_VOICE, text=""))
    assert empty.value.body["detail"][0]["loc"] == ["text"]
    with pytest.raises(elevenlabs.UnprocessableEntityError) as format:
        list(client.text_to_speech.convert(OTHER_VOICE, text=TEXT, output_format="midi"))
    assert format.value.body["detail"][0]["loc"] == ["query", "output_format"]
    with httpx.Client(trust_env=False, verify=False) as http, pytest.raises(elevenlabs.core.ApiError) as stranger:
        elevenlabs.ElevenLabs(base_url=nano.url, api_key="wrong", httpx_client=http).voices.get_all()
    assert (stranger.value.status_code, stranger.value.body["detail"]["status"]) == (401, "invalid_api_key")


def test_the_address_of_fish_audios_cloud_works(nano: Serving, spoken: bytes) -> None:
    with httpx.Client(trust_env=False, verify=False, timeout=240) as http:
        client = elevenlabs.ElevenLabs(base_url=f"{nano.url}/compat/elevenlabs", api_key=KEY, httpx_client=http)
        assert [model.model_id for model in client.models.list()] == ["nano"]
        assert b"".join(client.text_to_speech.convert(OTHER_VOICE, text=TEXT, output_format=PCM, seed=SEED)) == spoken
