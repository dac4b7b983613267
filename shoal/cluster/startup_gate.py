"""Count and stagger the starts of replicas."""

import time
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartTicket:
    """Reply of the gate to a replica that starts."""

    starts: int  # starts of this rank so far, this one included
    wait: float  # seconds to wait before loading


class StartupGate:
    """Single actor per cluster that counts starts by rank and keeps them `stagger_seconds` apart."""

    def __init__(self, stagger_seconds: float) -> None:
        self._stagger = stagger_seconds
        self._starts: Counter[int] = Counter()
        self._next = 0.0

    async def enter(self, rank: int) -> StartTicket:
        now = time.monotonic()
        start = max(now, self._next)
        self._next = start + self._stagger
        self._starts[rank] += 1
        return StartTicket(self._starts[rank], start - now)
