"""Pause of Python's garbage collector while a process imports torch and loads a model.

Importing torch and building a model creates half a million objects that live as long as the process. The collector
scans them again and again meanwhile and frees nothing.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """Collect no garbage inside the block; the collector skips what was created in it until `resume_full_gc`.

    Does nothing where the collector is off.
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


def resume_full_gc() -> None:
    """Let the collector consider the objects of `paused_gc` blocks again."""
    gc.unfreeze()
