"""How many voices may run at once: one per slot, until the device's memory says otherwise."""

from collections.abc import Callable

# Seconds without a failure before one more is let in; longer every time that was too many.
COOLDOWN_SECONDS = 60.0
MAX_COOLDOWN_SECONDS = 3600.0


class ConcurrencyLimit:
    def __init__(self, slots: int, clock: Callable[[], float]) -> None:
        self.most = slots
        self._slots, self._clock = slots, clock
        self._cooldown = COOLDOWN_SECONDS
        self._changed = clock()
        self._grown = False  # since memory last ran out

    def shrink(self, running: int) -> bool:
        """Memory ran out with so many: fewer from now on; False if that would be none."""
        self._cooldown = min(2 * self._cooldown, MAX_COOLDOWN_SECONDS) if self._grown else COOLDOWN_SECONDS
        self._changed, self._grown = self._clock(), False
        fewer = running * 3 // 4
        self.most = max(1, fewer)
        return fewer > 0

    def ask(self) -> None:
        """Somebody waits although there are slots: one more place, if it has been calm for long enough."""
        if self.most < self._slots and self._clock() - self._changed >= self._cooldown:
            self.most += 1
            self._changed, self._grown = self._clock(), True
