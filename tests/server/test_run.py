"""The server process, with an engine under the test's control."""

import asyncio
import gc
import logging
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.api.config import Limits
from shoal.gc_pause import resume_full_gc
from shoal.server.middleware.request_id import current_id
from shoal.server.run import DrainingServer, bind
from tests.server.conftest import free_port
from tests.server.standin import Standin, state_with


def test_the_collector_skips_what_exists_when_the_server_has_started(tmp_path: Path) -> None:
    async def frozen() -> int:
        supervisor: Any = None  # only a reload needs it
        server = DrainingServer(state := state_with(Standin(), Limits(), tmp_path), supervisor)
        with bind(replace(state.config, port=free_port())) as listener:
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup([listener])
            count = gc.get_freeze_count()
            await server.shutdown([listener])
        return count

    try:
        assert asyncio.run(frozen()) > 10_000
    finally:
        resume_full_gc()


def test_idle_connections_outlive_those_of_load_balancers(tmp_path: Path) -> None:
    """Google's keep them for 600 s, AWS's for 60 s; a request on a connection that is being closed is a 502."""
    supervisor: Any = None
    server = DrainingServer(state_with(Standin(), Limits(), tmp_path), supervisor)
    assert server.config.timeout_keep_alive > 600


def test_the_log_lines_of_a_shutdown_carry_the_id_of_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Python runs the handler of a signal in the context of the task that is running."""
    ids: list[tuple[str, str]] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            ids.append((record.getMessage(), current_id.get()))

    async def shut_down() -> None:
        supervisor: Any = None  # only a reload needs it
        server = DrainingServer(state := state_with(Standin(), Limits(), tmp_path), supervisor)
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        with bind(replace(state.config, port=free_port())) as listener:
            await server.startup([listener])
            current_id.set("of-a-request")
            server.handle_exit(signal.SIGTERM, None)
            while not server.should_exit:
                await asyncio.sleep(0)
            await server.shutdown([listener])

    caplog.set_level("INFO", logger="shoal.server.run")
    run_logger, noting = logging.getLogger("shoal.server.run"), Noting()
    run_logger.addHandler(noting)
    try:
        asyncio.run(shut_down())
    finally:
        run_logger.removeHandler(noting)
        resume_full_gc()
    assert ("shutting down: finishing 0 requests", "") in ids


@pytest.mark.parametrize(("soft", "hard", "allowed"), [(256, 4096, 612), (256, 300, 300), (2048, 4096, 2048)])
def test_as_many_files_may_be_open_as_connections_need(soft: int, hard: int, allowed: int) -> None:
    """In another process, because a hard limit cannot be raised again."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from shoal.server.run import allow_open_files; allow_open_files(100)\n"
        f"assert resource.getrlimit(resource.RLIMIT_NOFILE) == ({allowed}, {hard})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("the system allows 300" in done.stderr) == (hard == 300)
