"""Polling with one timeout for all tests: long, because the cores may be busy with other work."""

import time
from collections.abc import Callable

TIMEOUT_SECONDS = 600.0


def wait_until(
    condition: Callable[[], object],
    explain: Callable[[], str] = lambda: "the condition did not become true",
    *,
    interval: float = 0.01,
) -> None:
    """Poll every `interval` seconds until the condition is true; fail with the explanation after TIMEOUT_SECONDS."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(interval)
