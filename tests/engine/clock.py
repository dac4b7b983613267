"""Time that passes when told to."""

from dataclasses import dataclass


@dataclass
class FakeClock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now
