"""Small files of the server's own: written whole or not at all, and read by nobody but their owner."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import OutputError

if sys.platform != "win32":
    import fcntl


@contextmanager
def changing(path: Path, what: str) -> Iterator[None]:
    """Read the file and write it within: whoever else does so waits, also in another process. Raises OutputError.

    What is locked is a file beside it, since every change puts another file in its place. Windows has no such lock.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as problem:
        raise OutputError(f"{what} could not be written to {path}: {problem.strerror}") from problem
    try:
        if sys.platform != "win32":
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)  # and with it the lock


def write_whole(path: Path, content: str, what: str) -> None:
    """Raises OutputError that says `what` could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # mkstemp makes it readable for its owner only, and the rename keeps that.
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(fd)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as problem:
        raise OutputError(f"{what} could not be written to {path}: {problem.strerror}") from problem
