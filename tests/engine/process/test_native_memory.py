import os
import subprocess
import sys

import pytest

from shoal.engine.process.native_memory import TRIM_SECONDS, HeapTrimmer
from tests.engine.clock import FakeClock

# Frees buffers between others that stay, as codec calls do: glibc keeps their memory until the heap is trimmed. Those
# that stay are larger than any chunk that imports have left free below them, and never written, so not resident.
PROGRAM = """
import ctypes
from shoal.engine.process.native_memory import HeapTrimmer, bound_heap
from shoal.paths import rss_bytes

assert bound_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(30 << 20))  # raises the dynamic threshold: what is smaller comes from the heap
before = rss_bytes()
buffers, kept = [], []
for _ in range(8):
    buffers.append(libc.malloc(20 << 20))
    ctypes.memset(buffers[-1], 1, 20 << 20)
    kept.append(libc.malloc(1 << 20))
for buffer in buffers:
    libc.free(buffer)
free = rss_bytes()
HeapTrimmer().update(steps=1, active=0)
print((free - before) >> 20, (rss_bytes() - before) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_an_idle_engine_returns_free_memory_to_the_system() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    free, trimmed = map(int, done.stdout.split())
    assert free > 100
    assert trimmed < 20


def test_the_heap_is_trimmed_when_the_engine_becomes_idle_and_once_a_minute() -> None:
    clock, trims = FakeClock(), list[float]()
    trimmer = HeapTrimmer(lambda pad: trims.append(clock.now), clock)
    began = clock.now

    def update(seconds: float, steps: int, active: int) -> None:
        clock.now = began + seconds
        trimmer.update(steps, active)

    update(1.0, steps=0, active=0)  # nothing has run
    update(2.0, steps=10, active=1)
    update(3.0, steps=20, active=0)
    update(4.0, steps=20, active=0)  # still idle
    update(5.0, steps=30, active=2)
    update(3.0 + TRIM_SECONDS, steps=40, active=2)
    assert trims == [began + 3.0, began + 3.0 + TRIM_SECONDS]
