"""A limit of CPU time for code that must be linear: other work on the machine does not count."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Fail if the block takes more CPU seconds of this process than `seconds`. Only for the main thread."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"took more than {seconds} seconds of CPU time")

    before = signal.signal(signal.SIGVTALRM, fail)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
