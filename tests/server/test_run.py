"""The server process, with an engine under the test's control."""

import asyncio
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.api.config import Limits
from shoal.gc_pause import resume_full_gc
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
