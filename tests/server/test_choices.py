"""A server with other than default settings: CORS origins, paused slow readers, short references."""

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin

from shoal.api.config import KeyLimits
from shoal.api.keys import KeyFile
from tests.server.conftest import Serving, figure, samples_of, start
from tests.waiting import wait_until
from tests.websocket import connect

FRIEND, STRANGER = "https://app.example", "https://evil.example"
SAY = {"text": "Hello.", "max_new_tokens": 6, "seed": 4}


@dataclass
class Chosen:
    serving: Serving
    home: Path
    alice: str  # key with a small daily quota
    bob: str
    settings: dict[str, object]

    @property
    def http(self) -> httpx.Client:
        return self.serving.client(authorization=f"Bearer {self.bob}")


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chosen]:
    home = tmp_path_factory.mktemp("chosen")
    file = KeyFile(home / "keys.json")
    alice, bob = file.create("alice", KeyLimits(daily_audio_seconds=0.2)), file.create("bob")
    settings: dict[str, object] = {
        "keys_file": file.path,
        "cors_origins": FRIEND,
        "slow_reader": "pause",
        "buffer_bytes": 65_536,
        "reference_seconds": 1.5,
        "slots": 2,
    }
    made = Chosen(start(home, **settings), home, alice, bob, settings)
    yield made
    made.serving.end()


def test_codes_up_to_the_reference_limit_are_decoded(chosen: Chosen) -> None:
    def status(frames: int) -> int:
        tokens = {"tokens": [[[1] * frames] * 10]}
        return chosen.http.post("/v1/vqgan/decode", json=tokens).status_code

    assert (status(38), status(39)) == (200, 422)


def test_a_named_origin_may_send_requests_and_read_responses(chosen: Chosen) -> None:
    asks = {"origin": FRIEND, "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,content-type"
    preflight = httpx.options(f"{chosen.serving.url}/v1/tts", headers=asks, trust_env=False, verify=False)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == FRIEND
    answer = chosen.http.post("/v1/tts", json=SAY, headers={"origin": FRIEND, "sec-fetch-site": "cross-site"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, FRIEND)
    assert "X-Seed" in answer.headers["access-control-expose-headers"]
    refusal = chosen.http.post("/v1/tts", json={}, headers={"origin": FRIEND})
    assert (refusal.status_code, refusal.headers["access-control-allow-origin"]) == (422, FRIEND)


# Headers of OpenAI's and ElevenLabs' JavaScript clients.
@pytest.mark.parametrize(
    "headers", ["authorization,content-type,x-stainless-lang,x-stainless-timeout", "x-fern-language"]
)
def test_a_named_origin_may_send_the_headers_of_javascript_clients(chosen: Chosen, headers: str) -> None:
    asks = {"origin": FRIEND, "access-control-request-method": "POST", "access-control-request-headers": headers}
    preflight = httpx.options(f"{chosen.serving.url}/v1/tts", headers=asks, trust_env=False, verify=False)
    assert (preflight.status_code, preflight.headers["access-control-allow-headers"]) == (200, headers)


def test_other_origins_may_not(chosen: Chosen) -> None:
    asks = {"origin": STRANGER, "access-control-request-method": "POST"}
    preflight = httpx.options(f"{chosen.serving.url}/v1/tts", headers=asks, trust_env=False, verify=False)
    assert "access-control-allow-origin" not in preflight.headers
    form = {"id": (None, "x"), "text": (None, "La.")}
    sent = chosen.http.post(
        "/v1/references/add", files=form, headers={"origin": STRANGER, "sec-fetch-site": "cross-site"}
    )
    assert (sent.status_code, STRANGER in sent.json()["message"]) == (403, True)


@pytest.mark.parametrize("origin", [STRANGER, "null", "http://["])
def test_a_rejected_origin_gets_a_regular_error(server: Serving, http: httpx.Client, origin: str) -> None:
    """The refusal has a request id and the route's error format, and is in the log and the metrics."""
    refusals = 'shoal_http_responses_total{route="none",status="403"}'

    def counted() -> float:
        found = [line for line in http.get("/metrics").text.splitlines() if line.startswith(refusals)]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0

    before, id = counted(), f"stranger-{len(origin)}"
    fish = http.post("/v1/tts", json=SAY, headers={"origin": origin, "x-request-id": id})
    assert (fish.status_code, fish.json()["statusCode"], fish.headers["x-request-id"]) == (403, 403, id)
    openai = http.post("/v1/audio/speech", json={}, headers={"origin": origin})
    assert (openai.status_code, openai.json()["error"]["code"]) == (403, "foreign_origin")
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{server.port}/v1/tts/live", origin=Origin(origin))
    assert refused.value.response.status_code == 403
    assert refused.value.response.headers["x-request-id"]
    assert counted() == before + 3
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if id in line]
    assert [line["status"] for line in lines] == [403]


def test_without_cors_origins_other_origins_are_rejected(server: Serving, http: httpx.Client) -> None:
    foreign = {"origin": FRIEND, "sec-fetch-site": "cross-site"}
    assert http.post("/v1/tts", json=SAY, headers=foreign).status_code == 403
    assert "access-control-allow-origin" not in http.get("/health", headers=foreign).headers
    own = {"origin": server.url, "sec-fetch-site": "same-origin"}
    assert http.post("/v1/tts", json=SAY, headers=own).status_code == 200


def test_a_recording_over_the_limit_is_rejected(chosen: Chosen, recording: bytes) -> None:
    """The recording has two seconds; the engine rejects it in a request, the server when it is stored."""
    form = {"id": (None, "long"), "text": (None, "La."), "audio": ("a.wav", recording)}
    stored = chosen.http.post("/v1/references/add?format=json", files=form)
    assert (stored.status_code, "longer than 1.5 seconds" in stored.json()["message"]) == (400, True)
    files = [("reference_audio", ("a.wav", recording)), ("reference_text", (None, "La.")), ("text", (None, "Hello."))]
    inline = chosen.http.post("/v1/tts", files=files)
    assert (inline.status_code, "longer than 1.5 seconds" in inline.json()["message"]) == (400, True)


# As many bytes as possible from a short request: the kernel buffers megabytes.
WIDE = {
    "model": "tts-1",
    "voice": "alloy",
    "input": "Hello there.",
    "seed": 10,
    "temperature": 1.5,
    "top_p": 1.0,
    "max_new_tokens": 450,
    "response_format": "wav",
    "sample_rate": 192_000,
    "speed": 0.25,
}


def test_a_slow_client_gets_everything_and_holds_no_slot(chosen: Chosen) -> None:
    body, host = json.dumps(WIDE).encode(), f"127.0.0.1:{chosen.serving.port}"
    head = (
        f"POST /v1/audio/speech HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {chosen.bob}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    http, spoken = chosen.http, "shoal_frames_total"
    before = figure(http, spoken)
    with contextlib.closing(socket.socket()) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", chosen.serving.port))
        line.sendall(head.encode() + body)
        wait_until(
            lambda: (
                figure(http, spoken) >= before + WIDE["max_new_tokens"] and figure(http, "shoal_engine_running") == 0
            )
        )
        # The engine has finished, the server has not: the rest waits in the buffer.
        assert figure(http, "shoal_requests_in_flight") == 1
        received = b"".join(iter(lambda: line.recv(1 << 16), b""))
    audio = unchunked(received.partition(b"\r\n\r\n")[2])
    at_once = samples_of(http.post("/v1/audio/speech", json=WIDE).content)
    late = samples_of(audio)
    # The tempo filter's last samples depend on chunk boundaries.
    assert abs(len(late) - len(at_once)) < 0.01 * len(at_once)
    assert np.abs(late).max() > 0
    wait_until(lambda: figure(http, "shoal_requests_in_flight") == 0)


def unchunked(body: bytes) -> bytes:
    pieces = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        pieces.append(body[:length])
        body = body[length + 2 :]
    assert pieces[-1] == b"", "the stream has no proper end"
    return b"".join(pieces)


def test_a_restart_does_not_reset_daily_quotas(chosen: Chosen) -> None:
    """Last in this file, because it stops the shared server."""

    def alice(serving: Serving) -> int:
        headers = {"authorization": f"Bearer {chosen.alice}"}
        return httpx.post(
            f"{serving.url}/v1/tts", json=SAY, headers=headers, timeout=240, trust_env=False, verify=False
        ).status_code

    assert [alice(chosen.serving), alice(chosen.serving)] == [200, 429]
    assert chosen.serving.end() == 0
    stored = json.loads((chosen.home / "shoal" / "usage.json").read_text())
    assert stored["keys"].keys() == {"alice"}
    chosen.serving = start(chosen.home, **chosen.settings)
    assert alice(chosen.serving) == 429
