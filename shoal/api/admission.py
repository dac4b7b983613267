"""Admission limits of one serving process: requests in flight, and memory held by request bodies."""

import math
from collections import Counter
from dataclasses import dataclass, field

from shoal.errors import EngineBusy, counted

# A client may hold at most this many times the places that are free (dynamic thresholds, Choudhury and Hahne). So a
# single client gets three quarters of the queue, n active clients get 3 / (1 + 3n) each, and a new client is admitted.
SHARE_OF_FREE = 3


@dataclass(slots=True)
class AdmissionQueue:
    """Counts requests in flight, running or waiting for a slot; rejects new ones above `capacity`. Not thread-safe."""

    capacity: int
    slots: int
    in_flight: int = 0
    average_seconds: float = 2.0  # moving average of request durations
    by_client: Counter[str] = field(default_factory=Counter)  # requests in flight

    def acquire(self, client: str = "", *, shared: bool = False) -> None:
        """Take a place. Raises EngineBusy if the queue is full, or with `shared` if the client has used its share."""
        free, own = self.capacity - self.in_flight, self.by_client[client]
        if free <= 0:
            raise EngineBusy(f"{self.in_flight} requests are in flight and the queue is full; try again later")
        if shared and own >= SHARE_OF_FREE * free:
            raise EngineBusy(
                f"{counted(own, 'request')} of this key in flight, all of its share of the queue; try again later"
            )
        self.in_flight += 1
        self.by_client[client] += 1

    def release(self, seconds: float, client: str = "") -> None:
        """End a request that took `seconds`."""
        self.in_flight -= 1
        self.by_client[client] -= 1
        if not self.by_client[client]:
            del self.by_client[client]
        self.average_seconds += 0.1 * (seconds - self.average_seconds)

    def retry_after_seconds(self) -> float:
        """Estimate when a new request would get a slot: rounds of requests ahead of it times their average duration."""
        rounds = math.ceil((self.in_flight + 1) / max(1, self.slots))
        return min(600.0, max(1.0, rounds * self.average_seconds))


class BodyBudget:
    """Bounds the memory that the bodies of all requests and live sessions in flight hold together. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used = max_bytes, 0

    def acquire(self, size: int) -> None:
        """Take `size` bytes of the budget. Raises EngineBusy when fewer are left."""
        if self.used + size > self.max_bytes:
            raise EngineBusy("too many uploads are in flight; try again later")
        self.used += size

    def release(self, size: int) -> None:
        self.used -= size


class BodyReservation:
    """Bytes of the budget that one body holds while it, or the objects parsed from it, are in use."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self._size = budget, 0

    def grow(self, size: int) -> None:
        """Reserve `size` more bytes. Raises EngineBusy when the budget is exhausted."""
        self._budget.acquire(size)
        self._size += size

    def transfer(self) -> "BodyReservation":
        """Move the reserved bytes to a new reservation and return it; this one is empty afterwards."""
        other = BodyReservation(self._budget)
        other._size, self._size = self._size, 0
        return other

    def resize(self, size: int) -> None:
        """Hold `size` bytes from now on. Raises EngineBusy when the budget is exhausted."""
        self._budget.acquire(size - self._size)
        self._size = size

    def release(self) -> None:
        """Return the reserved bytes to the budget. Idempotent."""
        self._budget.release(self._size)
        self._size = 0

    close = release  # for contextlib.closing
