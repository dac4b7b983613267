"""The short form of the soak test; `scripts/soak` is the long one."""

import asyncio
from pathlib import Path

import pytest

from tests.server.soak import Soak, open_soak, temporary_files
from tests.waiting import wait_until

REQUESTS = 90


def test_no_request_is_lost_or_mixed_up_while_engines_die_and_the_server_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "")  # restored after the test; `open_soak` sets it
    soak = open_soak(tmp_path, "random:tiny", seed=3)
    try:
        asyncio.run(short_form(soak))
        assert soak.wrong == []
        assert soak.sent == 3 * REQUESTS
        assert soak.outcomes["complete"] > REQUESTS
        for outcome in ("disconnected", "bad, refused", "engine killed", "server stopped", "reloaded"):
            assert soak.outcomes[outcome], outcome
        warm, last = soak.series
        # The codec is not called with one shape twice in the warm-up only: some slack for what it caches.
        assert last.engine_bytes - warm.engine_bytes < 64 << 20
        assert last.server_bytes - warm.server_bytes < 16 << 20
    finally:
        assert soak.server.end() == 0, soak.server.log.read_text()[-5000:]
    assert temporary_files(tmp_path) == []


async def short_form(soak: Soak) -> None:
    await soak.learn(numbers=4)

    async def disturb() -> None:
        soak.kill_engine()
        await soak.wait_until_ready()
        await soak.reload()
        await soak.stop_and_start()

    await soak.run(REQUESTS, workers=6, disturb=disturb)
    await soak.run(REQUESTS, workers=6)
    first = soak.measure()
    await soak.run(REQUESTS, workers=6)
    soak.measure()

    def settled() -> bool:
        now = soak.measure()
        soak.series.pop()
        return now.descriptors <= first.descriptors + 4 and now.threads <= first.threads + 4

    await asyncio.to_thread(wait_until, settled)
