"""Markup, lexicons and the text as the model reads it, through the Fish and the OpenAI API."""

from urllib.parse import unquote

import httpx
import pytest

from tests.server.conftest import samples_of

SAY = {"seed": 3, "max_new_tokens": 4}
OPENAI = {"model": "tts-1", "voice": "alloy", "response_format": "pcm", "sample_rate": 16_000, **SAY}
RATE = 16_000


def test_pauses_are_exact_in_every_api(http: httpx.Client) -> None:
    plain, paused = "Hello. There.", 'Hello. [pause:0.5s] <break time="250ms"/> There.'
    fish = [len(samples_of(http.post("/v1/tts", json={**SAY, "text": text}).content)) for text in (plain, paused)]
    # The pause ends a turn, and each turn has four frames.
    assert fish == [4 * 640, 8 * 640 + round(0.75 * RATE)]
    openai = http.post("/v1/audio/speech", json={**OPENAI, "input": paused}).content
    assert len(openai) == 2 * fish[1]
    streamed = http.post("/v1/tts", json={**SAY, "text": paused, "streaming": True, "format": "pcm"}).content
    assert len(streamed) == 2 * fish[1]


def test_the_text_that_the_model_reads_is_returned_in_a_header(http: httpx.Client) -> None:
    body = {**SAY, "text": "**Dr.** nginx é paid $5. [pause:1s] [whisper] Hi.", "lexicon": {"nginx": "engine x"}}
    spoken = "Dr. engine x é paid $5. [pause:1s] [whisper] Hi."
    for streaming in (False, True):
        answer = http.post("/v1/tts", json={**body, "show_text": True, "streaming": streaming})
        assert unquote(answer.headers["X-Spoken-Text"]) == spoken
    english = {**OPENAI, "input": body["text"], "lexicon": body["lexicon"], "normalize": "en", "show_text": True}
    answer = http.post("/v1/audio/speech", json=english)
    spelled = "Doctor engine x e paid five dollars. [pause:1s] [whisper] Hi."
    assert unquote(answer.headers["X-Spoken-Text"]) == spelled
    assert "X-Spoken-Text" not in http.post("/v1/tts", json=body).headers
    long = http.post("/v1/tts", json={**SAY, "text": "Wörter und " * 60, "show_text": True, "max_new_tokens": 1})
    assert unquote(long.headers["X-Spoken-Text"]).startswith("Wörter und Wörter")


def test_the_text_route_shows_turns_without_speaking(http: httpx.Client) -> None:
    text = '<speak><break time="1s"/>One. <prosody rate="fast" volume="loud">Two.</prosody></speak>'
    answer = http.post("/v1/text", json={"text": text})
    assert answer.status_code == 200
    plain = {"voice": None, "pause_after": 0.0}
    assert answer.json() == {
        "text": "[pause:1s] One. Two.",
        "pause_before": 1.0,
        "turns": [
            {**plain, "text": "One.", "rate": 1.0, "volume": 0.0},
            {**plain, "text": "Two.", "rate": 1.25, "volume": 6.0},
        ],
    }


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"text": "<speak>a</p></speak>"}, 400, "SSML line 1, column 11: mismatched tag"),
        ({"text": "Hello.", "ssml": True}, 400, "SSML line 1, column 1: syntax error"),
        ({"text": "[pause:99s] Hello."}, 400, "a pause of 99 s is too long"),
        ({"text": "GIF", "lexicon": {"GIF": "/QQ/"}}, 422, "is not an Arpabet phoneme"),
        ({"text": "a", "lexicon": {"a": "b"}, "normalize": False}, 422, "normalize: false passes the text unchanged"),
        ({"text": "a", "normalize": "xx"}, 422, "Input should be 'en', 'de' or 'fr'"),
        ({"text": "a", "lexicon": {str(n): "b" for n in range(101)}}, 422, "at most 100 items"),
        ({"text": '<speak><voice name="nobody">Hi.</voice></speak>'}, 404, "nobody"),
    ],
)
def test_invalid_markup_and_lexicons_are_refused(
    http: httpx.Client, fields: dict[str, object], status: int, message: str
) -> None:
    answer = http.post("/v1/tts", json={**SAY, **fields})
    assert answer.status_code == status
    assert message in answer.text.replace("\\", "")


def test_forms_carry_lexicons_and_switches_as_text(http: httpx.Client) -> None:
    fields = {
        "text": "nginx",
        "lexicon": '{"nginx": "engine x"}',
        "normalize": "en",
        "ssml": "false",
        "show_text": "true",
    }
    answer = http.post("/v1/tts", files={name: (None, str(value)) for name, value in {**SAY, **fields}.items()})
    assert answer.status_code == 200, answer.text
    assert unquote(answer.headers["X-Spoken-Text"]) == "engine x"
