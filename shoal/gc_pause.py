"""Keep Python's garbage collector from scanning objects that live as long as the process.

Importing torch and building a model creates half a million of them, a server's imports and routes a hundred thousand.
Every full collection would scan them all and free nothing.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """Disable garbage collection inside the block; then skip all existing objects, as `skip_existing_objects` does.

    Does nothing if the collector is disabled already.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def skip_existing_objects() -> None:
    """Let the collector skip all objects that exist now, garbage included, until `resume_full_gc`.

    Call it once start-up is complete: a full collection of a server's modules and routes takes 0.1 s, in which no
    request is answered. There is little garbage at that time, and collecting it first would take as long.
    """
    gc.freeze()


def resume_full_gc() -> None:
    """Let the collector scan the objects that `paused_gc` and `skip_existing_objects` excluded."""
    gc.unfreeze()
