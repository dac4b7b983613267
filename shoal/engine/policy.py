"""When waiting sequences may start. The scheduler asks; slots and memory have the last word."""

from dataclasses import dataclass
from typing import Literal, Protocol

from shoal.errors import InvalidRequest

PolicyName = Literal["continuous", "dynamic", "static"]


class AdmissionPolicy(Protocol):
    def quota(self, waiting: int, running: int, oldest_wait: float) -> int:
        """How many of `waiting` may start beside `running`; the oldest has waited `oldest_wait` seconds."""


@dataclass(frozen=True)
class Continuous:
    """Whoever comes starts at the next frame."""

    def quota(self, waiting: int, running: int, oldest_wait: float) -> int:
        return waiting


@dataclass(frozen=True)
class Dynamic:
    """Collect a batch of `size`, or what has come after `seconds`; run it to its end; then the next."""

    size: int = 4
    seconds: float = 0.05

    def quota(self, waiting: int, running: int, oldest_wait: float) -> int:
        if running or (waiting < self.size and oldest_wait < self.seconds):
            return 0
        return min(waiting, self.size)


@dataclass(frozen=True)
class Static:
    """Whatever waits when the device falls idle, up to `size`, is one batch; nobody joins it."""

    size: int = 4

    def quota(self, waiting: int, running: int, oldest_wait: float) -> int:
        return 0 if running else min(waiting, self.size)


def admission_policy(name: PolicyName, size: int, seconds: float) -> AdmissionPolicy:
    """The policy of that name; `size` and `seconds` are for those that collect."""
    if name == "continuous":
        return Continuous()
    if name == "dynamic":
        return Dynamic(size, seconds)
    if name == "static":
        return Static(size)
    raise InvalidRequest(f"unknown batching policy {name!r}: continuous, dynamic or static")
