"""A second signal, as an operator or `docker stop` in a hurry sends it."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import ROOT, free_port, surroundings
from tests.waiting import TIMEOUT_SECONDS, wait_until

ENDLESS = """
import asyncio, sys, uvicorn
from contextlib import asynccontextmanager
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route
from shoal.server.stopping import StoppableServer

async def audio():
    yield b"begun"
    await asyncio.Event().wait()

@asynccontextmanager
async def lifespan(app):
    yield
    print("closed")

app = Starlette(routes=[Route("/", lambda request: StreamingResponse(audio()))], lifespan=lifespan)
config = uvicorn.Config(app, port=int(sys.argv[1]), timeout_graceful_shutdown=3600, access_log=False)
StoppableServer(config).run()
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_requests_and_closes_the_application(sent: signal.Signals, tmp_path: Path) -> None:
    port = free_port()

    def accepts() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=surroundings(tmp_path),
    ) as process:
        wait_until(accepts)
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS) as client, client.makefile("rb") as answer:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while b"begun" not in answer.readline():
                pass
            process.send_signal(sent)
            wait_until(lambda: not accepts())
            process.send_signal(sent)
            out, err = process.communicate(timeout=TIMEOUT_SECONDS)
            assert b"0\r\n\r\n" not in answer.read()  # the client sees that the response was cut
    assert (process.returncode, out) == (0, "closed\n"), err
    assert "Traceback" not in err
