"""Limit the free memory that glibc's heap keeps in the engine process.

Codec calls allocate and free buffers of many sizes, and small blocks that live longer fragment the heap between them.
Therefore the number of arenas, by default eight per core, is bounded, and free memory is returned to the system when
the engine is idle. A fixed mmap threshold would return buffers at once, but its page faults double the time of large
codec calls (nano on an AMD EPYC).
"""

import ctypes
import logging
import sys
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

M_ARENA_MAX = -8  # from glibc's malloc.h
MAX_ARENAS = 4
TRIM_SECONDS = 60.0  # between trims of an engine that is never idle


def bound_heap() -> bool:
    """Bound the number of malloc arenas; return False without glibc. Must be called before threads start."""
    mallopt = _function("mallopt")
    return mallopt is not None and bool(mallopt(M_ARENA_MAX, MAX_ARENAS))


def trim_heap() -> None:
    """Return free memory of the heap to the system, where there is glibc."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


class HeapTrimmer:
    """Returns free memory of the heap to the system: when the engine becomes idle, and once a minute if it does not."""

    def __init__(
        self, trim: Callable[[int], object] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._trim, self._clock = trim or _function("malloc_trim"), clock
        self._steps, self._trimmed = 0, clock()

    def update(self, steps: int, active: int) -> None:
        """Trim if steps have run since the last time, and the engine is idle or a minute has passed."""
        due = active == 0 or self._clock() - self._trimmed >= TRIM_SECONDS
        if self._trim is not None and steps != self._steps and due:
            self._steps, self._trimmed = steps, self._clock()
            self._trim(0)


def _function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
