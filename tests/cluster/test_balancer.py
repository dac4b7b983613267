"""The balancer as a process in front of two real servers, and in front of servers that fail."""

import asyncio
import contextlib
import logging
import queue
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import ormsgpack
import pytest
from starlette.requests import HTTPConnection, Request
from starlette.testclient import TestClient
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request as Handshake
from websockets.http11 import Response as Refusal
from websockets.sync.server import ServerConnection, serve

from shoal.api.config import Limits
from shoal.api.exceptions import ClientDisconnected
from shoal.cluster.balancer.app import BalancerServer, create_balancer
from shoal.cluster.balancer.config import BalancerConfig, WorkerAddress
from shoal.cluster.balancer.proxy import Proxy, path_and_query, voice_in_path
from shoal.cluster.balancer.workers import WeightedShares, WorkerPool
from tests.server.conftest import ROOT, Serving, command, free_port, samples_of, start, surroundings
from tests.server.standin import listening, state_with
from tests.server.test_slow_readers import (
    ask_for_a_live_session,
    ask_for_a_whole_answer,
    is_connected,
    slow_line,
    talker,
)
from tests.waiting import TIMEOUT_SECONDS, wait_until
from tests.websocket import connect

SAY = {"text": "The tide is coming in.", "seed": 7, "max_new_tokens": 12, "format": "wav"}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    home = tmp_path_factory.mktemp("workers")
    started = [start(home / str(number), wait=False, slots=4) for number in range(2)]
    for serving in started:
        serving.wait_until_ready()
    yield started
    for serving in started:
        serving.end()


@pytest.fixture(scope="module")
def balancer(workers: list[Serving], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    home, port = tmp_path_factory.mktemp("balancer"), free_port()
    urls = ",".join(serving.url for serving in workers)
    flags = ["balance", "--workers", urls, "--port", str(port), "--strategy", "round-robin"]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command(*flags), stdout=log, stderr=log, cwd=ROOT, env=surroundings(home))
    serving = Serving(process, f"http://127.0.0.1:{port}", home / "log", home)
    serving.wait_until_ready()
    wait_until(lambda: httpx.get(f"{serving.url}/v1/health", trust_env=False, verify=False).json()["ready"] == 2)
    yield serving
    assert serving.end() == 0, serving.log.read_text()


def test_requests_alternate_between_the_servers_and_sound_the_same(balancer: Serving, workers: list[Serving]) -> None:
    with ThreadPoolExecutor(4) as pool, balancer.client() as client:
        answers = list(pool.map(lambda _: client.post("/v1/tts", json=SAY), range(4)))
    direct = workers[0].client().post("/v1/tts", json=SAY)
    assert Counter(answer.headers["x-shoal-worker"] for answer in answers) == {"worker-1": 2, "worker-2": 2}
    assert {len(samples_of(answer.content)) for answer in answers} == {len(samples_of(direct.content))}
    reported = balancer.client().get("/v1/workers").json()["workers"]
    assert [worker["slots"] for worker in reported] == [4, 4]
    assert all(worker["first_byte_ms"]["p50"] > 0 and worker["in_flight"] == 0 for worker in reported)


def test_errors_and_headers_of_the_servers_pass_through(balancer: Serving) -> None:
    wrong = balancer.client().post("/v1/tts", json={"text": ""}, headers={"X-Request-ID": "find-me"})
    assert (wrong.status_code // 100, wrong.headers["x-request-id"]) == (4, "find-me")
    models = balancer.client().get("/v1/models")
    assert models.json()["object"] == "list"
    assert len(models.headers.get_list("date")) == 1
    assert balancer.client().get("/nowhere").status_code == 404


def test_pages_of_other_origins_are_rejected(balancer: Serving) -> None:
    foreign = balancer.client().post("/v1/tts", json=SAY, headers={"Origin": "https://evil.example"})
    own = balancer.client().post("/v1/tts", json=SAY, headers={"Origin": balancer.url})
    assert (foreign.status_code, own.status_code) == (403, 200)


def test_a_live_session_passes_through(balancer: Serving) -> None:
    url = balancer.url.replace("http", "ws") + "/v1/tts/live"
    begin = {"event": "start", "request": {"text": "", "seed": 7, "max_new_tokens": 12, "format": "pcm"}}
    with connect(url) as session:
        for event in (begin, {"event": "text", "text": "The tide is coming in. "}, {"event": "stop"}):
            session.send(ormsgpack.packb(event))
        events = []
        while not events or events[-1]["event"] != "finish":
            events.append(ormsgpack.unpackb(session.recv(timeout=240)))
    assert events[-1]["reason"] == "stop"
    assert sum(len(event.get("audio", b"")) for event in events) > 1000


class Breaking(BaseHTTPRequestHandler):
    """Ready server that fails every POST: at once, or as the path says, after some audio or with an unknown status."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        if "half" in self.path:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"4\r\nRIFF\r\n")
        elif "799" in self.path:
            self.send_response(799, "Odd")
            self.end_headers()
        self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def breaking() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Breaking) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextlib.contextmanager
def balanced(*urls: str, **settings: Any) -> Iterator[httpx.Client]:
    """A balancer in this process whose workers are checked once, before the first request.

    On a busy machine a worker may take seconds to answer that check, so it has more time than by default.
    """
    addresses, port = tuple(WorkerAddress(url) for url in urls), free_port()
    settings = {"check_seconds": 3600, "connect_seconds": TIMEOUT_SECONDS, **settings}
    config = BalancerConfig(addresses, port=port, strategy="round-robin", **settings)
    server = BalancerServer(config)
    thread = Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False, timeout=240) as client:
            wait_until(lambda: client.get("/v1/health").json()["ready"] == len(urls))
            yield client
    finally:  # a test that fails must not leave a thread, for which the process would wait
        server.should_exit = True
        thread.join()


def test_a_request_without_audio_is_repeated_on_another_server(breaking: str, workers: list[Serving]) -> None:
    with balanced(breaking, workers[0].url) as client:
        answer = client.post("/v1/tts", json=SAY)
        assert (answer.status_code, answer.headers["x-shoal-worker"]) == (200, "worker-2")
        assert len(samples_of(answer.content)) > 1000
        broken, working = client.get("/v1/workers").json()["workers"]
        exported = client.get("/metrics").text
    assert (broken["healthy"], broken["failed"], working["healthy"]) == (False, 1, True)
    for name, url, value in (
        ("shoal_worker_healthy", broken["url"], 0),
        ("shoal_worker_failures_total", broken["url"], 1),
        ("shoal_worker_healthy", working["url"], 1),
        ("shoal_worker_requests_total", working["url"], 1),
    ):
        assert re.search(rf'^{name}{{url="{url}",worker="worker-\d"}} {value}.0$', exported, re.MULTILINE), exported
    assert "shoal_ready 1.0" in exported.splitlines()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/text-to-speech/otis/stream",
        "/v1/text-to-dialogue",
        "/compat/elevenlabs/v1/text-to-speech/otis",
        "/compat/elevenlabs/v1/text-to-dialogue/stream",
        "/v1/text",
        "/v1/convert",
    ],
)
def test_every_request_that_stores_nothing_is_repeated(path: str, breaking: str, workers: list[Serving]) -> None:
    with balanced(breaking, workers[0].url) as client:
        answer = client.post(path, json={})
    assert (answer.status_code // 100, answer.headers["x-shoal-worker"]) == (4, "worker-2")


def test_a_request_that_changes_something_is_not_repeated(breaking: str, workers: list[Serving]) -> None:
    with balanced(breaking, workers[0].url) as client:
        answer = client.post("/v1/references/add", content=b"")
    assert (answer.status_code, "may or may not" in answer.text) == (503, True)


def test_a_status_that_http_does_not_have_counts_as_a_failure(breaking: str, workers: list[Serving]) -> None:
    with balanced(breaking, workers[0].url) as client:
        assert client.post("/v1/tts?799", json=SAY).headers["x-shoal-worker"] == "worker-2"
    with balanced(breaking) as client:
        answer = client.post("/v1/references/add?799", content=b"")
    assert (answer.status_code, "may or may not" in answer.text) == (503, True)


def test_a_response_that_breaks_off_is_not_repeated(breaking: str, workers: list[Serving]) -> None:
    with balanced(breaking, workers[0].url) as client, pytest.raises(httpx.RemoteProtocolError):
        client.post("/v1/tts?half", json=SAY)


def test_copies_of_requests_are_compared_with_another_server(breaking: str, workers: list[Serving]) -> None:
    control, candidate = (serving.url for serving in workers)
    with balanced(control, compare_url=candidate, compare_share=0.5) as client:
        answers = [client.post("/v1/tts", json={**SAY, "seed": seed}) for seed in range(4)]
        assert {answer.headers["x-shoal-worker"] for answer in answers} == {"worker-1"}
        client.get("/v1/models")  # only speech is copied
        wait_until(lambda: client.get("/v1/comparison").json()["pairs"] == 2)
        found = client.get("/v1/comparison").json()
    for side in ("control", "candidate"):
        assert (found[side]["failed"], found[side]["judged"]) == (0, 2)
        assert 0 < found[side]["first_byte_ms"]["p50"] <= found[side]["total_ms"]["p95"]
    # Both servers have the same model, so the same seeds give the same audio.
    assert found["candidate_minus_control"]["audio_seconds"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert found["candidate_minus_control"]["total_ms"].keys() == {"mean", "low", "high"}


def test_a_candidate_that_fails_affects_no_client(breaking: str, workers: list[Serving]) -> None:
    with balanced(workers[0].url, compare_url=breaking, compare_share=1.0) as client:
        assert client.post("/v1/tts", json=SAY).status_code == 200
        wait_until(lambda: client.get("/v1/comparison").json()["pairs"] == 1)
        found = client.get("/v1/comparison").json()
    assert (found["control"]["failed"], found["candidate"]["failed"]) == (0, 1)
    assert found["candidate_minus_control"]["total_ms"] is None


def test_without_a_ready_server_the_balancer_says_so() -> None:
    app = create_balancer(BalancerConfig((WorkerAddress(f"http://127.0.0.1:{free_port()}"),)))
    with TestClient(app, base_url="http://localhost") as client:
        answer = client.post("/v1/tts", json=SAY)
        assert (answer.status_code, "no worker is ready" in answer.text) == (503, True)
        assert client.get("/v1/health").status_code == 503
        assert "shoal_ready 0.0" in client.get("/metrics").text.splitlines()


def test_groups_are_chosen_in_proportion_to_their_weights() -> None:
    shares = WeightedShares()
    chosen = [shares.order({1.0: 9.0, 0.1: 1.0})[0] for _ in range(100)]
    assert Counter(chosen) == {1.0: 90, 0.1: 10}
    assert all(0.1 in chosen[start : start + 10] for start in range(0, 100, 10))


def test_a_small_weight_gets_its_share_under_every_strategy() -> None:
    for strategy in ("round-robin", "least-connections", "voice-affinity"):
        config = BalancerConfig(
            (WorkerAddress("http://a"), WorkerAddress("http://b"), WorkerAddress("http://c", 0.5)),
            strategy=strategy,  # type: ignore[arg-type]
        )
        pool = WorkerPool(config, httpx.AsyncClient())
        for worker in pool.workers:
            worker.mark("")
        first = Counter(pool.order("name:alice")[0].name for _ in range(50))
        assert first["worker-3"] == 10
        assert sorted(each.name for each in pool.order(None)) == ["worker-1", "worker-2", "worker-3"]


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for flags, message in (
            (["--workers", "localhost:8080"], "http://HOST:PORT"),
            (["--workers", "http://a", "--port", str(taken.getsockname()[1])], "in use; choose others with --host and"),
        ):
            ran = subprocess.run(
                [sys.executable, "-m", "shoal.cli", "balance", *flags],
                capture_output=True,
                text=True,
                cwd=ROOT,
                env=surroundings(tmp_path),
                timeout=300,
            )
            assert (ran.returncode, message in ran.stderr) == (2, True), ran.stderr


def speech_request(disconnected: asyncio.Event) -> Request:
    """Request whose client disconnects when the event is set."""
    body = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop()
        await disconnected.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/v1/tts", "query_string": b"", "headers": []}
    return Request({**scope, "state": {"request_id": "one"}}, receive)


def test_requests_leave_a_worker_that_hangs_and_answers_no_checks() -> None:
    """A machine without power sends neither bytes nor a reset; its requests must not wait for ever."""
    arrived = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "healthy":
            return httpx.Response(200, stream=httpx.ByteStream(b"{}"), headers={"content-type": "application/json"})
        if request.url.path == "/ready":
            raise httpx.ReadTimeout("no answer")
        arrived.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> tuple[str, WorkerPool]:
        addresses = (WorkerAddress("http://hangs"), WorkerAddress("http://healthy"))
        config = BalancerConfig(addresses, strategy="round-robin", give_up_checks=2)
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            pool = WorkerPool(config, client)
            for worker in pool.workers:
                worker.mark("")
            sending = asyncio.create_task(Proxy(config, pool, client).forward(speech_request(asyncio.Event())))
            await arrived.wait()
            await pool.check()
            assert not sending.done()  # one slow check is no proof
            await pool.check()
            return (await asyncio.wait_for(sending, TIMEOUT_SECONDS)).headers["x-shoal-worker"], pool

    served_by, pool = asyncio.run(scenario())
    assert (served_by, pool.workers[0].counts["failed"], pool.workers[0].waits) == ("worker-2", 1, set())


def test_a_client_that_disconnects_before_the_first_byte_cancels_the_request_at_the_worker() -> None:
    arrived, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async def scenario() -> WorkerPool:
        config, disconnected = BalancerConfig((WorkerAddress("http://slow"),)), asyncio.Event()
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            pool = WorkerPool(config, client)
            pool.workers[0].mark("")
            sending = asyncio.create_task(Proxy(config, pool, client).forward(speech_request(disconnected)))
            await arrived.wait()
            disconnected.set()
            with pytest.raises(ClientDisconnected):
                await asyncio.wait_for(sending, TIMEOUT_SECONDS)
            await asyncio.wait_for(cancelled.wait(), TIMEOUT_SECONDS)
            return pool

    (worker,) = asyncio.run(scenario()).workers
    assert (worker.in_flight, worker.healthy, worker.counts["failed"]) == (0, True, 0)


def break_off(connection: ServerConnection) -> None:
    connection.recv()
    connection.socket.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def socket_worker(answer: int | Callable[[ServerConnection], None]) -> Iterator[str]:
    """Ready server that refuses every WebSocket with a status, or accepts it and calls a function."""

    def refuse(connection: ServerConnection, request: Handshake) -> Refusal | None:
        if request.path == "/ready":
            return connection.respond(200, "{}")
        return connection.respond(answer, "the reason") if isinstance(answer, int) else None

    with serve(break_off if isinstance(answer, int) else answer, "127.0.0.1", 0, process_request=refuse) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def live_url(client: httpx.Client) -> str:
    return str(client.base_url.join("/v1/tts/live")).replace("http", "ws")


def test_a_socket_that_a_full_worker_refuses_goes_to_another_one(workers: list[Serving]) -> None:
    with socket_worker(503) as full, balanced(full, workers[0].url) as client:
        with connect(live_url(client)) as session:
            assert session.response is not None
            assert session.response.headers["x-shoal-worker"] == "worker-2"
            assert "x-model" in session.response.headers
        refused = client.get("/v1/workers").json()["workers"][0]
    assert (refused["healthy"], refused["retried"]) == (True, 1)


@pytest.mark.parametrize("status", [401, 503])
def test_the_refusal_of_a_socket_passes_through(status: int) -> None:
    with socket_worker(status) as url, balanced(url) as client, pytest.raises(InvalidStatus) as refused:
        connect(live_url(client))
    assert (refused.value.response.status_code, refused.value.response.body) == (status, b"the reason")


def test_a_socket_continues_the_trace_of_the_client() -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    def answer(connection: ServerConnection) -> None:
        assert connection.request is not None
        connection.send(connection.request.headers.get("traceparent", "none"))

    headers = {"traceparent": parent}
    with (
        socket_worker(answer) as url,
        balanced(url) as client,
        connect(live_url(client), additional_headers=headers) as session,
    ):
        assert session.recv(timeout=TIMEOUT_SECONDS) == parent


def test_a_worker_lost_during_a_live_session_is_taken_out() -> None:
    with socket_worker(break_off) as url, balanced(url) as client:
        with connect(live_url(client)) as session:
            session.send(b"")
            with pytest.raises(ConnectionClosed) as closed:
                session.recv(timeout=TIMEOUT_SECONDS)
        (lost,) = client.get("/v1/workers").json()["workers"]
        with pytest.raises(InvalidStatus) as refused:
            connect(live_url(client))
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, lost["healthy"], lost["failed"]) == (1011, False, 1)
    assert refused.value.response.status_code == 503
    assert b"no worker is ready" in refused.value.response.body


def test_a_client_that_disconnects_during_a_live_session_closes_it_at_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    codes: queue.Queue[int | None] = queue.Queue()

    def note_code(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            connection.recv()
        codes.put(connection.close_code)

    with socket_worker(note_code) as url, balanced(url) as client:
        with connect(live_url(client)) as session:
            session.socket.shutdown(socket.SHUT_RDWR)  # without a close frame
            assert codes.get(timeout=TIMEOUT_SECONDS) == 1001
        (worker,) = client.get("/v1/workers").json()["workers"]
    assert (worker["healthy"], worker["failed"]) == (True, 0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("live", [False, True])
def test_a_client_that_reads_nothing_is_disconnected(live: bool, tmp_path: Path) -> None:
    """Otherwise it would keep a connection, and a request at the worker, for as long as it likes."""
    state, limits = state_with(talker(), Limits(), tmp_path), Limits(stall_seconds=0.3)
    with listening(state) as port, balanced(f"http://127.0.0.1:{port}", limits=limits) as client:
        with slow_line(client.base_url.port or 0) as line:
            ask_for_a_live_session(line) if live else ask_for_a_whole_answer(line)
            wait_until(lambda: not is_connected(line))
        wait_until(lambda: client.get("/v1/workers").json()["workers"][0]["in_flight"] == 0)
        (worker,) = client.get("/v1/workers").json()["workers"]
    assert (worker["healthy"], worker["failed"]) == (True, 0)


def test_a_socket_goes_to_the_replica_of_the_voice_in_its_path() -> None:
    paths = ("/v1/text-to-speech/otis/stream-input", "/compat/elevenlabs/v1/text-to-speech/otis/stream-input")
    sockets = [HTTPConnection({"type": "websocket", "path": path, "headers": []}) for path in (*paths, "/v1/tts/live")]
    assert [voice_in_path(each) for each in sockets] == ["name:otis", "name:otis", None]


def test_sockets_are_forwarded_to_the_target_as_the_client_wrote_it() -> None:
    scope = {
        "type": "websocket",
        "path": "/v1/text-to-speech/my voice?/stream-input",
        "query_string": b"model_id=a%20b",
    }
    escaped = {**scope, "raw_path": b"/v1/text-to-speech/my%20voice%3F/stream-input"}
    expected = "/v1/text-to-speech/my%20voice%3F/stream-input?model_id=a%20b"
    assert [path_and_query(HTTPConnection(each)) for each in (escaped, scope)] == [expected, expected]
