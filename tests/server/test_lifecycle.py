"""Lifecycle of a server process: start, full queue, API keys, engine crash, shutdown."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from shoal.api.keys import KeyFile
from tests.lazy import LazyModule
from tests.server.conftest import (
    ROOT,
    Serving,
    Start,
    command,
    figure,
    pause_engine,
    samples_of,
    start,
    surroundings,
)
from tests.waiting import TIMEOUT_SECONDS, wait_until
from tests.websocket import connect

openai = LazyModule("openai")
LONG = {"text": "Hello there.", "max_new_tokens": 150, "streaming": True, "seed": 10, "temperature": 1.5, "top_p": 1.0}
# Hundreds of turns: no machine finishes them within the server's deadline.
ENDLESS = {**LONG, "text": "Hello there. " * 300, "chunk_length": 16, "max_new_tokens": 1500}


def run(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = surroundings(home) | variables
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=240, cwd=ROOT, env=env)


def test_a_missing_model_ends_the_server(tmp_path: Path) -> None:
    ended = run(tmp_path, "serve", "--model", "no-such-model", "--port", "0")
    assert ended.returncode == 8
    assert "error: no-such-model: no such directory" in ended.stderr


def test_a_busy_port_ends_the_server(tmp_path: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as door:
        ended = run(tmp_path, "serve", "--model", "random:tiny", "--port", str(door.getsockname()[1]))
    assert (ended.returncode, "Address already in use" in ended.stderr) == (2, True)


def ready(serving: Serving) -> dict[str, Any]:
    status: dict[str, Any] = httpx.get(f"{serving.url}/ready", timeout=240, trust_env=False, verify=False).json()
    return status


def speak(serving: Serving, body: dict[str, object], **headers: str) -> httpx.Response:
    return httpx.post(f"{serving.url}/v1/tts", json=body, headers=headers, timeout=240, trust_env=False, verify=False)


def test_keys_authenticate_and_their_limits_hold(start_server: Start, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    alice, bob = file.create("alice"), file.create("bob")
    serving = start_server(keys_file=file.path, slots=1, max_waiting=1, requests_per_minute=6, daily_audio_seconds=0.2)
    say = {"text": "Hello.", "max_new_tokens": 6, "seed": 4}
    anonymous = speak(serving, say)
    assert (anonymous.status_code, anonymous.headers["www-authenticate"]) == (401, "Bearer")
    assert speak(serving, say, authorization="Bearer wrong").json()["message"] == "Invalid token"
    assert speak(serving, say, authorization=f"Bearer {alice}").status_code == 200
    spent = speak(serving, say, authorization=f"Bearer {alice}")
    assert (spent.status_code, int(spent.headers["retry-after"]) > 1) == (429, True)
    assert [speak(serving, {}, authorization=f"Bearer {bob}").status_code for _ in range(7)] == [422] * 6 + [429]
    assert httpx.get(f"{serving.url}/health", trust_env=False, verify=False).status_code == 200
    assert httpx.get(f"{serving.url}/metrics", trust_env=False, verify=False).status_code == 401
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{serving.port}/v1/tts/live")
    assert refused.value.response.status_code == 401
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(api_key="wrong", base_url=f"{serving.url}/v1", http_client=serving.client()).models.list()
    document = httpx.get(f"{serving.url}/openapi.json", trust_env=False, verify=False).json()
    assert document["paths"]["/v1/tts"]["post"]["security"] == [{"HTTPBearer": []}]
    file.revoke("bob")

    def key_is_refused() -> bool:
        status = speak(serving, say, authorization=f"Bearer {bob}").status_code
        assert status in (401, 429)
        return status == 401

    wait_until(key_is_refused, interval=0.1)  # the server reads the file again every second


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with capacity for two requests that soon disconnects clients that do not read."""
    limits = {"request_seconds": 600, "buffer_bytes": 65536, "stall_seconds": 1}
    serving = start(tmp_path_factory.mktemp("tight"), slots=1, max_waiting=1, **limits)
    yield serving
    serving.end()


def test_a_full_queue_rejects_with_retry_after(tight: Serving) -> None:
    """One request runs, one waits, the next are rejected."""
    waited, refused = fill_the_queue(tight)
    assert (waited.status_code, {answer.status_code for answer in refused}) == (200, {429})
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)


def fill_the_queue(tight: Serving) -> tuple[httpx.Response, list[httpx.Response]]:
    """Return the response of the request that waited, and of three that came while the queue was full."""
    short = {**LONG, "max_new_tokens": 20}
    with concurrent.futures.ThreadPoolExecutor(1) as pool, tight.client() as http:
        with http.stream("POST", "/v1/tts", json=ENDLESS) as running:
            pieces = running.iter_bytes()  # kept: httpx closes the response with its iterator
            next(pieces)
            waits = pool.submit(speak, tight, short)
            wait_until(lambda: ready(tight)["in_flight"] == 2)
            refused = [speak(tight, short) for _ in range(3)]
        return waits.result(), refused


def test_a_request_that_exceeds_its_deadline_is_ended(start_server: Start) -> None:
    serving = start_server(slots=1, request_seconds=1)
    late = speak(serving, {**ENDLESS, "streaming": False})
    assert (late.status_code, late.json()["error"]) == (504, "Gateway Timeout")
    with pytest.raises(httpx.RemoteProtocolError):
        # Repeated on a busy machine that sends no audio within the deadline.
        wait_until(lambda: speak(serving, ENDLESS).status_code != 504)


def test_a_client_that_reads_nothing_is_disconnected(tight: Serving) -> None:
    # The highest byte rate: the kernel buffers megabytes before the server notices.
    wide = {"response_format": "wav", "sample_rate": 192_000, "speed": 0.25, "max_new_tokens": 1500}
    said = {"model": "tts-1", "voice": "alloy", "input": ENDLESS["text"], "seed": 10, "temperature": 1.5, "top_p": 1.0}
    body = json.dumps(said | wide).encode()
    head = "POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Content-Length: {}\r\n\r\n"
    with contextlib.closing(socket.socket()) as line, tight.client() as http:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", tight.port))
        line.sendall(head.format(len(body)).encode() + body)
        wait_until(lambda: 'shoal_errors_total{kind="stream_slow_reader"}' in http.get("/metrics").text, interval=0.1)
        assert http.get("/ready").json()["in_flight"] == 0


def test_start_engine_crash_and_graceful_shutdown(start_server: Start) -> None:
    """The server starts, speaks, survives a killed engine, and finishes requests before it stops."""
    serving = start_server(spawn=True, slots=4, wait=False, request_seconds=300, drain_seconds=200, backend="eager")
    engine = pause_engine(serving)
    refuses_until_ready(serving)
    os.kill(engine, signal.SIGCONT)
    serving.wait_until_ready()
    survives_its_engine(serving)
    finishes_before_it_ends(serving)


def refuses_until_ready(serving: Serving) -> None:
    wait_until(lambda: "listening" in serving.log.read_text(), serving.log.read_text)
    with serving.client() as http:
        assert http.get("/health").status_code == 200
        early = http.post("/v1/tts", json={"text": "Hi."})
        assert (early.status_code, early.headers["retry-after"]) == (503, "5")
        assert http.get("/ready").json()["state"] == "starting"
        assert http.get("/ping").status_code == 503


def outcome(serving: Serving, number: int) -> int | str:
    try:
        return speak(serving, {**LONG, "max_new_tokens": 30, "streaming": number % 2 == 0}).status_code
    except httpx.TransportError as broken:
        return type(broken).__name__


def survives_its_engine(serving: Serving) -> None:
    with concurrent.futures.ThreadPoolExecutor(12) as pool, serving.client() as http:
        frames = figure(http, "shoal_frames_total")
        engine = pause_engine(serving)
        outcomes = [pool.submit(outcome, serving, number) for number in range(12)]
        wait_until(lambda: ready(serving)["in_flight"] == 12)
        os.kill(engine, signal.SIGCONT)
        wait_until(lambda: figure(http, "shoal_frames_total") > frames)
        os.kill(engine, signal.SIGKILL)
        results = [each.result(240) for each in outcomes]
    assert set(results) <= {200, 503, "RemoteProtocolError", "ReadError"}
    assert results.count(200) >= 6
    serving.wait_until_ready()
    assert speak(serving, {"text": "Hi.", "max_new_tokens": 3}).status_code == 200


def finishes_before_it_ends(serving: Serving) -> None:
    longer = LONG | {"text": "Hello there. " * 8, "chunk_length": 40, "max_new_tokens": 30}  # several turns
    whole = samples_of(speak(serving, longer).content)
    with serving.client() as http, http.stream("POST", "/v1/tts", json=longer) as answer:
        pieces = answer.iter_bytes()
        audio = next(pieces)
        engine = pause_engine(serving)
        serving.process.send_signal(signal.SIGTERM)
        # The socket stays open: load balancers and new clients get a 503.
        with serving.client() as another:
            wait_until(lambda: another.get("/ready").json()["state"] == "stopping")
            assert another.get("/ready").status_code == 503
            refused = speak(serving, {"text": "Hi."})
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        os.kill(engine, signal.SIGCONT)
        audio += b"".join(pieces)
    assert serving.process.wait(240) == 0
    assert len(samples_of(audio)) == len(whole) > 30 * 640


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_skips_the_drain(sent: signal.Signals, start_server: Start) -> None:
    serving = start_server(slots=2, backend="eager", drain_seconds=3600)
    endless = LONG | {"text": "Hello there. " * 700, "max_new_tokens": 700}  # sixteen turns, half a minute
    with serving.client() as http, http.stream("POST", "/v1/tts", json=endless) as answer:
        pieces = answer.iter_bytes()  # keep a reference: dropping it closes the connection
        next(pieces)
        engine = pause_engine(serving)  # so that the request does not end
        serving.process.send_signal(sent)
        wait_until(lambda: ready(serving)["state"] == "stopping")
        serving.process.send_signal(sent)
        assert serving.process.wait(240) == 0, serving.log.read_text()
        with pytest.raises(httpx.TransportError):  # it was not spoken to its end
            b"".join(pieces)
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)
    log = serving.log.read_text()
    assert "CancelledError" not in log
    assert "disconnected" not in log  # the client did not
    assert log.count(": shutdown, ") == 1


def test_a_request_without_audio_gets_a_503_at_the_end_of_the_drain(start_server: Start) -> None:
    serving = start_server(slots=1, backend="eager", drain_seconds=3600)
    pause_engine(serving)
    with concurrent.futures.ThreadPoolExecutor() as pool, serving.client() as http:
        sent = pool.submit(http.post, "/v1/tts", json={"text": "Hi."})
        wait_until(lambda: ready(serving)["in_flight"] == 1)
        serving.process.send_signal(signal.SIGTERM)
        wait_until(lambda: ready(serving)["state"] == "stopping")
        serving.process.send_signal(signal.SIGTERM)
        answer = sent.result(TIMEOUT_SECONDS)
    assert (answer.status_code, answer.json()["statusCode"]) == (503, 503), answer.text
    assert {"x-request-id", "retry-after"} < set(answer.headers)
    assert serving.process.wait(240) == 0


def test_the_server_process_does_not_import_torch(server: Serving) -> None:
    """The engine has its own process; a second copy of torch would cost seconds and a quarter of a gigabyte."""
    assert "torch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert server.memory() < 400 << 20


def test_curl_speaks(server: Serving, tmp_path: Path) -> None:
    out = tmp_path / "a.wav"
    body = '{"text":"Hello.","max_new_tokens":5,"streaming":true}'
    request = ["curl", "-sSN", "--noproxy", "*", "-H", "content-type: application/json", "-d", body]
    subprocess.run([*request, "-o", str(out), f"{server.url}/v1/tts"], check=True, timeout=240)
    assert out.read_bytes().startswith(b"RIFF")
