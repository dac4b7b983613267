"""Append-only journal of finished lines, synced after every write. A crash damages at most the last entry."""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import InvalidRequest
from shoal.paths import output_errors, sync_directory

OPENING = b'{"line": '  # first bytes of every entry


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Result of one input line, stored as one JSON object per line."""

    line: int
    id: str
    status: Literal["done", "failed"]
    digest: str | None = None
    file: str | None = None
    size: int | None = None  # bytes of the file
    audio_seconds: float | None = None
    wall_seconds: float | None = None
    seed: int | None = None
    finish: str | None = None
    error: str | None = None

    def encoded(self) -> bytes:
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


class Journal:
    """Journal file of one process; its threads may share it. Opening truncates a partial last entry."""

    def __init__(self, path: Path) -> None:
        self._directory, self._lock = path.parent, threading.Lock()
        with output_errors(path):
            self._file = path.open("a+b")
            self._file.truncate(sum(len(raw) for raw in _whole_lines(path)))

    def add(self, entries: list[JournalEntry]) -> None:
        """Append and sync entries: they and their audio files survive a power loss. Thread-safe. Raises OutputError."""
        with self._lock, output_errors(self._directory):
            sync_directory(self._directory)
            self._file.write(b"".join(entry.encoded() for entry in entries))
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """Yield all complete entries; skip a partial last one. Raises InvalidRequest for a file of another program."""
    foreign = InvalidRequest(f"{path} was not written by `shoal batch`; choose another -o")
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                if not _is_partial(raw):
                    raise foreign
                return
            try:
                yield JournalEntry(**json.loads(raw))
            except (ValueError, TypeError):
                raise foreign from None


def _is_partial(raw: bytes) -> bool:
    """Return whether these bytes are the beginning of an entry. A power loss can leave zeros in place of data."""
    return OPENING.startswith(raw[: len(OPENING)].partition(b"\0")[0])


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (raw for raw in file if raw.endswith(b"\n"))
