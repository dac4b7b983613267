"""Back-off before a backend that failed in service is tried again."""

from collections.abc import Callable

FIRST_SECONDS = 60.0
MAX_SECONDS = 3600.0


class RetryTimer:
    """Doubles the delay with each failure; resets it if the backend worked for longer than the last delay."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._delay = 0.0
        self._due: float | None = None
        self._stopped = clock()

    def start(self) -> float:
        """Set the timer after a failure and return its delay in seconds."""
        now = self._clock()
        if self._due is None:  # else this is another failure before the next attempt: the delay stays
            lasted = now - self._stopped > self._delay
            self._delay = FIRST_SECONDS if lasted or not self._delay else min(2 * self._delay, MAX_SECONDS)
        self._due = now + self._delay
        return self._delay

    def due(self) -> bool:
        return self._due is not None and self._clock() >= self._due

    def stop(self) -> None:
        """Clear the timer: the backend is being tried again."""
        self._due, self._stopped = None, self._clock()
