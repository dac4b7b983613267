"""The highest rate that keeps the promise: doubled until it breaks, then halved in between."""

from collections.abc import Awaitable, Callable

# Whether a rate kept the promise.
Trial = Callable[[float], Awaitable[bool]]

FINENESS = 1.1  # the answer is at most a tenth below the rate that broke
LEAST = 1 / 64
MAX_TRIALS = 14


async def highest_rate(trial: Trial, first: float) -> float | None:
    """Requests per second; None if not even the least rate keeps it. Every rate is tried once."""
    kept, broken, rate = 0.0, float("inf"), first
    for _ in range(MAX_TRIALS):
        if await trial(rate):
            kept = rate
        else:
            broken = rate
        if (kept and broken / kept <= FINENESS) or (not kept and rate < LEAST):
            break
        rate = _between(kept, broken)
    return kept or None


def _between(kept: float, broken: float) -> float:
    if not kept:
        return broken / 4
    return kept * 2 if broken == float("inf") else (kept * broken) ** 0.5
