"""Small files of the server's own: written whole or not at all, and read by nobody but their owner."""

import os
import tempfile
from pathlib import Path

from shoal.errors import OutputError


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
