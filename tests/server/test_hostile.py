"""Malicious requests: each gets a 4xx in bounded time and memory, and the server keeps running."""

import contextlib
import io
import socket
import struct
import time
from collections.abc import Iterator

import httpx
import ormsgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import Serving

TTS = (
    "POST /v1/tts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "User-Agent: test\r\nContent-Length: {length}\r\n\r\n"
)
GIGABYTE = 1 << 30


@pytest.fixture(autouse=True)
def unharmed(server: Serving) -> Iterator[None]:
    """After each test the server is alive, has not grown much, and still generates speech."""
    before = server.memory()
    yield
    with server.client() as http:
        assert http.get("/ready").status_code == 200
    assert server.memory() - before < 150 << 20


def connect(server: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=240)


def status_line(line: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while b"\r\n" not in received and (piece := line.recv(4096)):
            received += piece
    return received.split(b"\r\n")[0]


def test_a_declared_gigabyte_is_rejected_before_it_is_sent(server: Serving) -> None:
    with connect(server) as line:
        line.sendall(TTS.format(length=GIGABYTE).encode())
        began = time.monotonic()
        assert b" 413 " in status_line(line)
    assert time.monotonic() - began < 240


def test_a_chunked_gigabyte_is_rejected_at_the_limit(server: Serving) -> None:
    head = "POST /v1/references/add HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    piece = b"%x\r\n" % (1 << 20) + b"\0" * (1 << 20) + b"\r\n"
    sent = 0
    with connect(server) as line:
        line.sendall((head + "Content-Type: multipart/form-data; boundary=b\r\n\r\n").encode())
        with contextlib.suppress(ConnectionError):
            while sent < GIGABYTE:
                line.sendall(piece)
                sent += 1 << 20
    assert 32 << 20 <= sent < 128 << 20


def test_a_slowly_sent_body_times_out(server: Serving) -> None:
    with connect(server) as line:
        line.sendall(TTS.format(length=1000).encode())
        began = time.monotonic()
        assert b" 408 " in status_line(line)
    assert 1.5 < time.monotonic() - began < 240


@pytest.mark.parametrize("start", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: "])
def test_slowly_sent_headers_time_out(server: Serving, start: bytes) -> None:
    with connect(server) as line:
        line.sendall(start)
        began = time.monotonic()
        assert b" 408 " in status_line(line)
    assert time.monotonic() - began < 240


@pytest.mark.parametrize(
    "flood", [b"X-A: b\r\n" * 20_000, b"X-A: " + b"b" * 500_000, b"Cookie: " + b"a" * 40_000 + b"\r\n\r\n"]
)
def test_too_many_headers_are_rejected(server: Serving, flood: bytes) -> None:
    with connect(server) as line:
        with contextlib.suppress(ConnectionError):
            line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + flood)
        assert status_line(line).split(b" ")[1:2] in ([b"431"], [b"400"], [])


def test_data_that_is_not_http_is_a_400(server: Serving) -> None:
    with connect(server) as line:
        line.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        assert b" 400 " in status_line(line)


def zip_bomb() -> bytes:
    """A flac file with hours of silence in a few kilobytes."""
    import av
    import numpy as np

    sink = io.BytesIO()
    with av.open(sink, "w", format="flac") as container:
        stream = container.add_stream("flac", 8000)
        stream.codec_context.layout = "mono"  # type: ignore[union-attr]
        stream.codec_context.format = "s16"  # type: ignore[union-attr]
        for number in range(60):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 480_000), np.int16), "s16", "mono")
            frame.sample_rate, frame.pts = 8000, number * 480_000
            container.mux(stream.encode(frame))  # type: ignore[union-attr]
        container.mux(stream.encode(None))  # type: ignore[union-attr]
    return sink.getvalue()


def test_a_compression_bomb_is_rejected(http: httpx.Client) -> None:
    bomb = zip_bomb()
    assert len(bomb) < 1 << 20
    began = time.monotonic()
    for answer in (
        http.post("/v1/references/add", data={"id": "bomb", "text": "a"}, files={"audio": ("a", bomb)}),
        http.post(
            "/v1/vqgan/encode",
            content=ormsgpack.packb({"audios": [bomb]}),
            headers={"content-type": "application/msgpack"},
        ),
    ):
        assert answer.status_code == 400
    assert time.monotonic() - began < 240


def test_a_wav_with_a_false_length_is_rejected(http: httpx.Client) -> None:
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", 2**31 - 1, b"WAVE", b"fmt ", 16, 1, 1, 8000, 16000, 2, 16, b"data", 2**30
    )
    answer = http.post(
        "/v1/references/add", data={"id": "bomb", "text": "a"}, files={"audio": ("a", header + b"\1\2" * 9000)}
    )
    assert answer.status_code == 400


MANY = 4 << 20


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/vqgan/decode", ormsgpack.packb({"tokens": [[[-1] * 300_000]]})),
        ("/v1/vqgan/decode", b"\x81\xa6tokens\x91\x91\xdd" + MANY.to_bytes(4) + b"\xff" * MANY),
        ("/v1/tts", b"\xdd" + MANY.to_bytes(4) + b"\x90" * MANY),
        ("/v1/tts", ormsgpack.packb({"text": "a", "references": [[]] * 100_000})),
        ("/v1/tts", ormsgpack.packb({"text": "a"} | {str(number): 0 for number in range(100_000)})),
        ("/v1/tts", ormsgpack.packb({"text": "a", "x" * 1_000_000: 0})),
    ],
)
def test_a_body_of_many_elements_gets_a_short_error(http: httpx.Client, path: str, body: bytes) -> None:
    """One error per element used to need gigabytes; the fixture checks the memory of the server."""
    answer = http.post(path, content=body, headers={"content-type": "application/msgpack"})
    assert answer.status_code == 422
    assert len(answer.content) < 16_000


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa4text",
        b"\x93\x01\x02\x03",
        b"\xc0",
        b"",
    ],
)
def test_broken_msgpack_is_a_422(http: httpx.Client, body: bytes) -> None:
    assert http.post("/v1/tts", content=body, headers={"content-type": "application/msgpack"}).status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[" * 100_000,
        b'{"text":NaN}',
        b'"text"',
        b"\xff\xfe",
        b'{"text":"\\ud800"}',
        b'{"text":"a","seed":' + b"9" * 5000 + b"}",
    ],
)
def test_broken_json_is_a_4xx(http: httpx.Client, body: bytes) -> None:
    assert http.post("/v1/tts", content=body, headers={"content-type": "application/json"}).status_code in (400, 422)


WHOLE = b'--b\r\nContent-Disposition: form-data; name="text"\r\n\r\nHello.\r\n--b--\r\n'


@pytest.mark.parametrize(
    "body",
    [
        WHOLE[:-8],
        WHOLE[:40],
        WHOLE[:3],
        b"",
        b"--b\r\n\r\n",
        b"garbage",
        b"--b--\r\n",
        WHOLE[:-7] * 200 + WHOLE,
    ],
)
def test_a_broken_form_is_a_422(http: httpx.Client, body: bytes) -> None:
    kind = {"content-type": "multipart/form-data; boundary=b"}
    assert http.post("/v1/tts", content=body, headers=kind).status_code == 422


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/xml", "", "multipart/form-data", "application/json; charset=latin-1"]
)
def test_wrong_content_types_are_rejected(http: httpx.Client, kind: str) -> None:
    answer = http.post("/v1/tts", content=b"<a/>", headers={"content-type": kind})
    assert answer.status_code in (415, 422)


def test_a_compressed_body_is_not_decompressed(http: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert http.post("/v1/tts", content=b"\x1f\x8b", headers=headers).status_code == 415


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
def test_an_encoding_that_changes_nothing_is_accepted(http: httpx.Client, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    assert http.post("/v1/text", content=b'{"text": "Hi."}', headers=headers).status_code == 200


@pytest.mark.parametrize("text", ["<|im_end|>", "<|semantic:5|>", "Hi <|im_\u200bend|> there"])
def test_control_tokens_in_a_text_are_rejected(http: httpx.Client, text: str) -> None:
    assert http.post("/v1/tts", json={"text": text}).status_code == 400


@pytest.mark.parametrize(
    "where", ["http://127.0.0.1:1/a.wav", "file:///etc/passwd", "/etc/passwd", "data:audio/wav;base64,AAAA"]
)
def test_urls_are_never_fetched(http: httpx.Client, where: str) -> None:
    answer = http.post("/v1/tts", json={"text": "Hi.", "references": [{"audio": where, "text": "Hi."}]})
    assert answer.status_code == 422
    assert "not fetched" in answer.text


@pytest.mark.parametrize(
    "path", ["/v1/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/tts/..%2f..", "/docs/../metrics/x"]
)
def test_path_traversal_is_a_404(server: Serving, path: str) -> None:
    with connect(server) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert b" 404 " in status_line(line)


def test_an_invalid_request_id_is_replaced(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x-request-id": "trace-7.a_b"}).headers["x-request-id"] == "trace-7.a_b"
    assert http.get("/health", headers={"x-request-id": "a b" * 90}).headers["x-request-id"] != "a b" * 90


FUZZ = settings(
    max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)
WORDS = st.sampled_from(["text", "format", "references", "prosody", "seed", "streaming", "audio", "reference_id"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@FUZZ
@given(content=st.dictionaries(WORDS, VALUES, max_size=5), cut=st.integers(0, 3))
def test_fuzzed_msgpack_gets_a_response(http: httpx.Client, content: dict[str, object], cut: int) -> None:
    packed = ormsgpack.packb({"max_new_tokens": 2, **content})
    body = packed[: len(packed) - cut]
    answer = http.post("/v1/tts", content=body, headers={"content-type": "application/msgpack"})
    assert answer.status_code in (200, 400, 404, 422)


@FUZZ
@given(body=st.binary(max_size=200))
def test_random_bytes_are_a_422(http: httpx.Client, body: bytes) -> None:
    for kind in ("application/msgpack", "application/json", "multipart/form-data; boundary=b"):
        assert http.post("/v1/tts", content=body, headers={"content-type": kind}).status_code == 422
