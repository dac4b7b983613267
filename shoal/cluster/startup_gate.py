"""Where replicas come in: counted, and one after the other."""

import time
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartTicket:
    """What the gate says to a replica that starts."""

    starts: int  # of this rank, this one included
    wait: float  # seconds until its turn


class StartupGate:
    """Counts the starts of every rank, and keeps them apart. There is one in the cluster, and it does nothing else."""

    def __init__(self, stagger_seconds: float) -> None:
        self._apart = stagger_seconds
        self._starts: Counter[int] = Counter()
        self._next = 0.0

    async def enter(self, rank: int) -> StartTicket:
        now = time.monotonic()
        turn = max(now, self._next)
        self._next = turn + self._apart
        self._starts[rank] += 1
        return StartTicket(self._starts[rank], turn - now)
