"""Admission policies: how many waiting sequences may start. The scheduler also applies slot and memory limits."""

from dataclasses import dataclass
from typing import Literal, Protocol

from shoal.errors import InvalidRequest

PolicyName = Literal["continuous", "dynamic", "static"]


class AdmissionPolicy(Protocol):
    def quota(self, waiting: int, running: int, oldest_wait: float) -> int:
        """Return how many of `waiting` sequences may start; the oldest has waited `oldest_wait` seconds."""


@dataclass(frozen=True)
class Continuous:
    """Admit every sequence at the next step."""

    def quota(self, waiting: int, running: int, oldest_wait: float) -> int:
        return waiting


@dataclass(frozen=True)
class Dynamic:
    """Collect a batch of `size`, or fewer after `seconds`, and run it to its end before the next."""

    size: int = 4
    seconds: float = 0.05

    def quota(self, waiting: int, running: int, oldest_wait: float) -> int:
        if running or (waiting < self.size and oldest_wait < self.seconds):
            return 0
        return min(waiting, self.size)


@dataclass(frozen=True)
class Static:
    """Start up to `size` waiting sequences as one batch when the device is idle; no sequence joins it."""

    size: int = 4

    def quota(self, waiting: int, running: int, oldest_wait: float) -> int:
        return 0 if running else min(waiting, self.size)


def admission_policy(name: PolicyName, size: int, seconds: float) -> AdmissionPolicy:
    """Return the policy of that name; `size` and `seconds` apply to those that collect batches."""
    if name == "continuous":
        return Continuous()
    if name == "dynamic":
        return Dynamic(size, seconds)
    if name == "static":
        return Static(size)
    raise InvalidRequest(f"unknown batching policy {name!r}: use continuous, dynamic or static")
