"""A server that is full refuses in its own words, and still says that it lives."""

import contextlib
import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from tests.server.conftest import Serving, start
from tests.server.test_lifecycle import ENDLESS
from tests.waiting import wait_until
from tests.websocket import connect

MOST = 2


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = start(tmp_path_factory.mktemp("small"), slots=4, connections=MOST)
    yield serving
    serving.end()


@contextlib.contextmanager
def filled(serving: Serving) -> Iterator[None]:
    """Open the maximum number of streams, and read all of them."""
    with contextlib.ExitStack() as streams, serving.client() as http:
        kept = []
        for _ in range(MOST):
            wait_until(lambda: is_accepted(http))  # the server notices the end of earlier streams with a delay
            answer = streams.enter_context(http.stream("POST", "/v1/tts", json=ENDLESS))
            assert answer.status_code == 200
            kept.append(answer.iter_bytes())
            next(kept[-1])
        yield


def is_accepted(http: httpx.Client) -> bool:
    """Send a request without its fields: 422 where there is a place for it, else 503."""
    status = http.post("/v1/tts", json={}).status_code
    assert status in (422, 503)
    return status == 422


def open_connection(serving: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", serving.port), timeout=240)


def lives(line: socket.socket) -> bool:
    line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        piece = line.recv(4096)
        if not piece:
            return False
        answer += piece
    return answer.startswith(b"HTTP/1.1 200")


def figure(http: httpx.Client, name: str) -> float:
    found = [line.rsplit(" ", 1)[1] for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(found[0]) if found else 0.0


def test_a_full_server_refuses_connections_and_answers_probes(small: Serving) -> None:
    refusals = 'shoal_http_responses_total{route="none",status="503"}'
    with small.client() as http, filled(small):
        for probe in ("/health", "/ready", "/ping", "/metrics"):
            assert http.get(probe).status_code == 200, probe
        before = figure(http, refusals)
        fish = http.post("/v1/tts", json={"text": "Hi."}, headers={"x-request-id": "too-late"})
        assert (fish.status_code, fish.headers["x-request-id"]) == (503, "too-late")
        assert int(fish.headers["retry-after"]) >= 1
        assert fish.json().keys() == {"statusCode", "message", "error"}
        openai = http.post("/v1/audio/speech", json={})
        assert (openai.status_code, openai.json()["error"]["code"]) == (503, "server_full")
        with pytest.raises(InvalidStatus) as refused:
            connect(f"ws://127.0.0.1:{small.port}/v1/tts/live")
        assert refused.value.response.status_code == 503
        assert {"x-request-id", "retry-after"} <= {name.lower() for name in refused.value.response.headers}
        assert figure(http, refusals) == before + 3
    lines = [json.loads(line) for line in small.log.read_text().splitlines() if "too-late" in line]
    assert [line["status"] for line in lines] == [503]


def test_finished_requests_free_their_places(small: Serving) -> None:
    with filled(small):
        pass
    with small.client() as http:
        for _ in range(3 * MOST):  # these would use up places that are not freed
            wait_until(lambda: is_accepted(http))


def test_idle_connections_are_closed_for_new_ones(small: Serving) -> None:
    with open_connection(small) as silent, open_connection(small) as asked:
        assert lives(asked)
        with open_connection(small) as third:
            assert silent.recv(4096) == b"", "it has waited longest"
            assert lives(third)
            with open_connection(small) as fourth:
                assert asked.recv(4096) == b"", "an answer does not keep its connection open"
                assert lives(third)
                assert lives(fourth)


def test_a_connection_in_use_is_not_closed_for_a_new_one(small: Serving) -> None:
    with filled(small), contextlib.ExitStack() as open_lines:
        for _ in range(4):
            assert lives(open_lines.enter_context(open_connection(small)))
        with small.client() as http:
            assert http.get("/ready").json()["in_flight"] == MOST
