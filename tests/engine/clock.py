"""A clock that tests advance by hand."""

from dataclasses import dataclass


@dataclass
class FakeClock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now
