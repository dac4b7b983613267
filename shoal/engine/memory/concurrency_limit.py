"""Concurrency limit: one sequence per slot, lowered when the device runs out of memory and raised again slowly."""

from collections.abc import Callable

# Seconds without an out-of-memory error before the limit grows by one; doubled whenever growing failed.
COOLDOWN_SECONDS = 60.0
MAX_COOLDOWN_SECONDS = 3600.0


class ConcurrencyLimit:
    """Maximum number of running sequences (`limit`). Not thread-safe."""

    def __init__(self, slots: int, clock: Callable[[], float]) -> None:
        self.limit = slots
        self._slots, self._clock = slots, clock
        self.cooldown_seconds = COOLDOWN_SECONDS
        self._changed = clock()
        self._grown = False  # whether the limit was raised since the last out-of-memory error

    def shrink(self, running: int) -> bool:
        """Lower the limit to 3/4 of `running` after an out-of-memory error; return False if only one was running."""
        self.cooldown_seconds = (
            min(2 * self.cooldown_seconds, MAX_COOLDOWN_SECONDS) if self._grown else COOLDOWN_SECONDS
        )
        self._changed, self._grown = self._clock(), False
        fewer = running * 3 // 4
        self.limit = max(1, fewer)
        return fewer > 0

    def maybe_grow(self) -> None:
        """Raise the limit by one if the cooldown has passed. Called while sequences wait."""
        if self.limit < self._slots and self._clock() - self._changed >= self.cooldown_seconds:
            self.limit += 1
            self._changed, self._grown = self._clock(), True
