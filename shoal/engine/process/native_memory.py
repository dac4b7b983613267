"""Bounds on what the C heap of the engine process keeps: glibc's defaults hold on to memory that is free.

Codec calls allocate and free buffers of megabytes, of other sizes for every batch. glibc raises its mmap threshold to
32 MiB when such buffers are freed, keeps them in the heap from then on, and has an arena per thread to do it in. With
a fixed threshold they go back to the system when they are freed.
"""

import ctypes
import logging
import sys
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Constants of glibc's malloc.h.
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
MMAP_BYTES = 4 << 20  # larger buffers are returned when they are freed; smaller ones are not worth the page faults
MAX_ARENAS = 4
TRIM_SECONDS = 60.0  # between trims of an engine that is never idle


def bound_heap() -> bool:
    """Fix the mmap threshold and the number of arenas. False where there is no glibc. Call it before threads start."""
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(M_ARENA_MAX, MAX_ARENAS))


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
