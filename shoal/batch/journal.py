"""Entries on disk, added at the end and synced. Whatever kills the writer tears at most the last one."""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import InvalidRequest
from shoal.paths import output_errors, sync_directory

OPENING = b'{"line": '  # of every entry


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """How a line of the input ended."""

    line: int
    id: str
    status: Literal["done", "failed"]
    digest: str | None = None
    file: str | None = None
    size: int | None = None  # of the file, in bytes
    audio_seconds: float | None = None
    wall_seconds: float | None = None
    seed: int | None = None
    finish: str | None = None
    error: str | None = None

    def encoded(self) -> bytes:
        told = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(told, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


class Journal:
    """Of one process, whose threads may share it. Opening it cuts off a torn end."""

    def __init__(self, path: Path) -> None:
        self._directory, self._writing = path.parent, threading.Lock()
        with output_errors(path):
            self._file = path.open("a+b")
            self._file.truncate(sum(len(raw) for raw in _whole_lines(path)))

    def add(self, entries: list[JournalEntry]) -> None:
        """Make entries last: after this, a power cut does not undo them, nor the names of their files."""
        with self._writing, output_errors(self._directory):
            sync_directory(self._directory)
            self._file.write(b"".join(entry.encoded() for entry in entries))
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """Everything that was added; a torn end is left out. Raises InvalidRequest when the file is not ours."""
    foreign = InvalidRequest(f"{path} is not a manifest of `shoal batch`; choose another -o")
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                if not _torn(raw):
                    raise foreign
                return
            try:
                yield JournalEntry(**json.loads(raw))
            except (ValueError, TypeError):
                raise foreign from None


def _torn(raw: bytes) -> bool:
    """Whether this began as an entry. Where a power cut kept bytes from the disk, there are zeros."""
    return OPENING.startswith(raw[: len(OPENING)].partition(b"\0")[0])


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (raw for raw in file if raw.endswith(b"\n"))
