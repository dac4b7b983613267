"""Python's garbage collector and objects that live as long as the process.

Importing torch and building a model creates half a million of them, a server's imports and routes a hundred thousand.
The collector scans them again and again and frees nothing.
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


def skip_existing_objects() -> None:
    """Let the collector skip all objects that exist now, garbage as well, until `resume_full_gc`.

    For a process that has started: a full collection of a server's modules and routes takes 0.1 s, in which no request
    is answered. What is garbage by then is little, and looking for it would take as long.
    """
    gc.freeze()


def resume_full_gc() -> None:
    """Let the collector consider the objects of `paused_gc` blocks and of `skip_existing_objects` again."""
    gc.unfreeze()
