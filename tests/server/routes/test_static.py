"""Routes of the web page: files, headers, and what is not served."""

import gzip
import io
import re
from pathlib import Path

import httpx
import pytest

from shoal.audio.decode import AudioLimits, read_audio
from shoal.server.routes.static import PAGE
from tests.server.conftest import Serving


def test_the_content_security_policy_allows_only_the_own_origin(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.status_code == 200
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert "<script>" not in answer.text
    assert "http://" not in answer.text.replace("http://www.w3.org", "")
    assert "https://" not in answer.text


def test_every_file_of_the_page_has_its_media_type(http: httpx.Client) -> None:
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".woff2": "font/woff2"}
    for file in (PAGE / "assets").rglob("*.*"):
        answer = http.get(f"/assets/{file.relative_to(PAGE / 'assets')}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kinds.get(file.suffix, "text/plain"))
        assert (answer.headers["x-content-type-options"], answer.headers["cache-control"]) == ("nosniff", "no-cache")


@pytest.mark.parametrize("path", ["/assets/../index.html", "/assets/%2e%2e/%2e%2e/errors.py", "/assets/none.js"])
def test_nothing_else_is_served(server: Serving, path: str) -> None:
    assert httpx.get(server.url + path, trust_env=False, verify=False).status_code == 404


def test_an_unchanged_file_is_not_sent_again(http: httpx.Client) -> None:
    etag = http.get("/assets/app.js").headers["etag"]
    assert http.get("/assets/app.js", headers={"If-None-Match": etag}).status_code == 304


@pytest.mark.parametrize("path", ["/", "/docs", "/assets/app.js", "/assets/mark.svg", "/swagger/swagger-ui.css"])
def test_text_is_compressed_for_clients_that_accept_it(http: httpx.Client, path: str) -> None:
    plain = http.get(path, headers={"Accept-Encoding": "identity"})
    with http.stream("GET", path, headers={"Accept-Encoding": "br, GZIP;q=0.5"}) as answer:
        sent = b"".join(answer.iter_raw())
    assert (gzip.decompress(sent), len(sent) < len(plain.content)) == (plain.content, True)
    assert answer.headers["content-length"] == str(len(sent))
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"
    assert answer.headers["content-type"] == plain.headers["content-type"]
    assert answer.headers["content-security-policy"] == plain.headers["content-security-policy"]
    head = http.head(path, headers={"Accept-Encoding": "gzip"})
    assert (head.headers["content-length"], head.headers["etag"]) == (str(len(sent)), answer.headers["etag"])


def test_the_compressed_and_the_plain_file_have_an_etag_each(http: httpx.Client) -> None:
    etags = {}
    for coding in ("gzip", "identity"):
        first = http.get("/", headers={"Accept-Encoding": coding})
        again = http.get("/", headers={"Accept-Encoding": coding, "If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert again.headers["vary"] == "Accept-Encoding"
        etags[coding] = first.headers["etag"]
    assert etags["gzip"] != etags["identity"]
    changed = http.get("/", headers={"Accept-Encoding": "gzip", "If-None-Match": '"another-gzip"'})
    assert (changed.status_code, changed.headers["content-encoding"]) == (200, "gzip")


@pytest.mark.parametrize("coding", ["", "identity", "br", "gzip;q=0", "br, gzip; q=0.000", "*;q=0"])
def test_a_client_that_refuses_gzip_gets_the_plain_file(http: httpx.Client, coding: str) -> None:
    answer = http.get("/assets/app.js", headers={"Accept-Encoding": coding})
    assert "content-encoding" not in answer.headers
    assert answer.content == (PAGE / "assets" / "app.js").read_bytes()


def test_ranges_are_those_of_the_plain_file(http: httpx.Client) -> None:
    answer = http.get("/assets/app.js", headers={"Accept-Encoding": "gzip", "Range": "bytes=3-9"})
    assert (answer.status_code, answer.content) == (206, (PAGE / "assets" / "app.js").read_bytes()[3:10])
    assert "content-encoding" not in answer.headers


def test_fonts_are_sent_as_they_are(http: httpx.Client) -> None:
    answer = http.get("/assets/fonts/figtree-latin.woff2", headers={"Accept-Encoding": "gzip"})
    assert {"content-encoding", "vary"}.isdisjoint(answer.headers)


def test_the_page_preloads_every_module_that_it_imports() -> None:
    """A module that is missing costs one more round trip per level of imports; one too many is loaded in vain."""
    listed = re.findall('<link rel="modulepreload" href="(.+)">', (PAGE / "index.html").read_text())
    needed = imported_by(PAGE / "assets" / "app.js", set())
    assert sorted(listed) == listed
    assert set(listed) == {str(path.relative_to(PAGE)) for path in needed}


def imported_by(module: Path, found: set[Path]) -> set[Path]:
    """Add the modules that a module imports, directly or not, to `found` and return it."""
    for name in re.findall(r'^(?:import|export)\b[^;]*?from\s+"(.+?)";', module.read_text(), re.MULTILINE):
        path = (module.parent / name).resolve()
        if path not in found:
            found.add(path)
            imported_by(path, found)
    return found


def test_about_lists_voices_defaults_and_limits(http: httpx.Client, recording: bytes) -> None:
    form = {"id": "about-me", "text": "What I say."}
    http.post("/v1/references/add", data=form, files={"audio": recording}).raise_for_status()
    content = http.get("/v1/about").json()
    assert (content["model"], content["sample_rate"], content["frame_rate"]) == ("random:tiny", 16_000, 25.0)
    (listed,) = [voice for voice in content["voices"] if voice["name"] == "about-me"]
    assert (listed["builtin"], listed["default"], listed["title"], listed["openai_names"]) == (False, False, "", [])
    assert (content["clones"], content["word_times"]) == (True, False)
    assert content["sampling"]["temperature"] == 0.8
    assert {"wav", "mp3", "opus"} < set(content["formats"])


@pytest.mark.parametrize("format", ["wav", "pcm", "mp3", "opus", "flac", "aac", "webm"])
def test_a_wav_file_can_be_converted_to_any_format(http: httpx.Client, recording: bytes, format: str) -> None:
    answer = http.post("/v1/convert", data={"format": format}, files={"audio": recording}).raise_for_status()
    if format == "pcm":
        assert answer.content == recording[44:]
        return
    decoded = read_audio(io.BytesIO(answer.content), 16_000, AudioLimits())
    assert decoded.seconds == pytest.approx(2.0, abs=0.15)


@pytest.mark.parametrize("audio", [b"", b"RIFF1234WAVE", b"ID3 not a wav file", b"RIFF\0\0\0\0WAVEfmt "])
def test_only_wav_files_are_converted(http: httpx.Client, audio: bytes) -> None:
    answer = http.post("/v1/convert", data={"format": "mp3"}, files={"audio": ("a", audio)})
    assert answer.status_code in (400, 422)
    assert answer.json()
