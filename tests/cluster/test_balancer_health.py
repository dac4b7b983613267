"""Health checks of the balancer's workers: lost servers, and answers that are not those of a Shoal server."""

import asyncio
import contextlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest

from shoal.cluster.balancer.config import BalancerConfig, WorkerAddress
from shoal.cluster.balancer.workers import Worker, WorkerPool
from tests.server.conftest import free_port
from tests.waiting import TIMEOUT_SECONDS


class Garbage(BaseHTTPRequestHandler):
    """Answers every GET with the same bytes, then with more of them that never end."""

    answer: bytes
    more: bytes = b""
    pause: float | None = None  # seconds between two pieces

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.connection.settimeout(self.pause)
        with contextlib.suppress(ConnectionError):
            self.wfile.write(self.answer)
            while self.more:
                self.wfile.write(self.more)
                with contextlib.suppress(TimeoutError):
                    if self.pause and not self.connection.recv(1):
                        return

    def log_message(self, format: str, *arguments: object) -> None:
        pass


async def checked(url: str, connect_seconds: float = TIMEOUT_SECONDS) -> Worker:
    """Return a worker that was healthy, after a health check."""
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        pool = WorkerPool(BalancerConfig((WorkerAddress(url),), connect_seconds=connect_seconds), client)
        pool.workers[0].mark("")
        await asyncio.wait_for(pool.check(), TIMEOUT_SECONDS)
        return pool.workers[0]


def test_a_worker_that_is_lost_is_taken_out_by_the_next_check() -> None:
    worker = asyncio.run(checked(f"http://127.0.0.1:{free_port()}"))
    assert (worker.healthy, "no answer" in worker.reason) == (False, True)


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        ({"answer": b"[]"}, "not a Shoal server"),
        ({"answer": b'"ready"'}, "not a Shoal server"),
        ({"answer": b"[" * 50_000}, "not a Shoal server"),
        ({"answer": b"<html></html>"}, "not a Shoal server"),
        ({"answer": b"\xff{}"}, "not a Shoal server"),
        ({"answer": b"{", "more": b" " * 4096}, "not a Shoal server"),
        ({"answer": b"{", "more": b" ", "pause": 0.05}, "no answer to /ready"),
    ],
    ids=["list", "string", "nested", "html", "bytes", "endless", "slow"],
)
def test_a_worker_that_answers_health_checks_with_garbage_is_not_healthy(garbage: dict[str, Any], reason: str) -> None:
    """Its answer must neither end nor hold up the checks, nor fill the memory."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Answering", (Garbage,), garbage)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        # Only the slow answer may time out, however busy this machine is.
        seconds = 1.0 if "pause" in garbage else TIMEOUT_SECONDS
        worker = asyncio.run(checked(f"http://127.0.0.1:{server.server_address[1]}", seconds))
        server.shutdown()
    assert (worker.healthy, worker.reason.partition(":")[0]) == (False, reason)
