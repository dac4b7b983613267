"""Search for the highest rate that meets the objective: double until it fails, then bisect."""

from collections.abc import Awaitable, Callable

# Run a rate and return whether it met the objective.
Trial = Callable[[float], Awaitable[bool]]

PRECISION = 1.1  # the result is at most 10 % below a rate that fails
MIN_RATE = 1 / 64
MAX_TRIALS = 14


async def highest_rate(trial: Trial, first: float) -> float | None:
    """Return the highest rate in requests per second; None if even the lowest fails. Every rate is tried once."""
    met, failed, rate = 0.0, float("inf"), first
    for _ in range(MAX_TRIALS):
        if await trial(rate):
            met = rate
        else:
            failed = rate
        if (met and failed / met <= PRECISION) or (not met and rate < MIN_RATE):
            break
        rate = _between(met, failed)
    return met or None


def _between(met: float, failed: float) -> float:
    if not met:
        return failed / 4
    return met * 2 if failed == float("inf") else (met * failed) ** 0.5
