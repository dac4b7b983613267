"""The page's own routes: what they serve, and what they let nobody do."""

import io

import httpx
import pytest

from shoal.audio.decode import AudioLimits, read_audio
from shoal.server.routes.static import PAGE
from tests.server.conftest import Serving


def test_the_page_forbids_what_is_not_its_own(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.status_code == 200
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert "<script>" not in answer.text
    assert "http://" not in answer.text.replace("http://www.w3.org", "")
    assert "https://" not in answer.text


def test_every_file_of_the_page_is_served_by_its_kind(http: httpx.Client) -> None:
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".woff2": "font/woff2"}
    for file in (PAGE / "assets").rglob("*.*"):
        answer = http.get(f"/assets/{file.relative_to(PAGE / 'assets')}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kinds.get(file.suffix, "text/plain"))
        assert (answer.headers["x-content-type-options"], answer.headers["cache-control"]) == ("nosniff", "no-cache")


@pytest.mark.parametrize("path", ["/assets/../index.html", "/assets/%2e%2e/%2e%2e/errors.py", "/assets/none.js"])
def test_nothing_else_is_served(server: Serving, path: str) -> None:
    assert httpx.get(server.url + path, trust_env=False).status_code == 404


def test_a_browser_that_has_a_file_does_not_get_it_again(http: httpx.Client) -> None:
    etag = http.get("/assets/app.js").headers["etag"]
    assert http.get("/assets/app.js", headers={"If-None-Match": etag}).status_code == 304


def test_about_tells_what_can_be_chosen(http: httpx.Client, recording: bytes) -> None:
    form = {"id": "about-me", "text": "What I say."}
    http.post("/v1/references/add", data=form, files={"audio": recording}).raise_for_status()
    told = http.get("/v1/about").json()
    assert (told["model"], told["sample_rate"], told["frame_rate"]) == ("random:tiny", 16_000, 25.0)
    assert {"name": "about-me", "builtin": False, "usual": False} in told["voices"]
    assert told["sampling"]["temperature"] == 0.8
    assert {"wav", "mp3", "opus"} < set(told["formats"])


@pytest.mark.parametrize("format", ["wav", "pcm", "mp3", "opus", "flac", "aac", "webm"])
def test_a_wav_file_is_put_into_any_format(http: httpx.Client, recording: bytes, format: str) -> None:
    answer = http.post("/v1/convert", data={"format": format}, files={"audio": recording}).raise_for_status()
    if format == "pcm":
        assert answer.content == recording[44:]
        return
    heard = read_audio(io.BytesIO(answer.content), 16_000, AudioLimits())
    assert heard.seconds == pytest.approx(2.0, abs=0.15)


@pytest.mark.parametrize("audio", [b"", b"RIFF1234WAVE", b"ID3 not a wav file", b"RIFF\0\0\0\0WAVEfmt "])
def test_only_wav_files_are_converted(http: httpx.Client, audio: bytes) -> None:
    answer = http.post("/v1/convert", data={"format": "mp3"}, files={"audio": ("a", audio)})
    assert answer.status_code in (400, 422)
    assert answer.json()
