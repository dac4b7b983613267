"""`manifest.jsonl` of an output directory: one entry per input line, written after its audio file is synced.

Entries are appended while a batch runs and sorted by input line at its end. Workers on other machines keep their own
journals in the same directory; they are merged at the end, or by the next run.
"""

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from shoal.batch.journal import Journal, JournalEntry, read_journal
from shoal.batch.lines import LineTask
from shoal.errors import InvalidRequest
from shoal.paths import PARTIAL_FILES, atomic_write, file_lock, output_errors, sync_directory

MANIFEST = "manifest.jsonl"
LOCK = ".shoal-batch.lock"
WORKERS = ".shoal-*.journal"


class Manifest:
    """Manifest of one output directory. `opened` excludes other runs while it is in use."""

    def __init__(self, out: Path) -> None:
        self.out, self.path = out, out / MANIFEST
        self._entries: dict[str | int, JournalEntry] = {}  # by `_key`; the newest entry wins
        self._journal: Journal

    @classmethod
    @contextmanager
    def opened(cls, out: Path) -> Iterator["Manifest"]:
        """Lock the directory and read its manifest; call `settle` at the end, also after an error.

        Raises InvalidRequest when another batch holds the lock, OutputError.
        """
        manifest = cls(out)
        with ExitStack() as files:
            with output_errors(out):
                out.mkdir(parents=True, exist_ok=True)
                files.enter_context(_locked(out))
                _clear(out, PARTIAL_FILES)
            manifest._read(manifest.path)  # before Journal truncates it: the file may belong to another program
            manifest._journal = files.enter_context(closing(Journal(manifest.path)))
            manifest._read_workers()
            try:
                yield manifest
            finally:
                manifest.settle()

    def has(self, task: LineTask) -> bool:
        """Return whether an earlier run spoke exactly this line and its file still has the recorded size."""
        entry = self._entries.get(task.name)
        if entry is None or entry.file is None or entry.digest != task.digest:
            return False
        with suppress(OSError):
            if (self.out / entry.file).stat().st_size == entry.size:
                self._entries[task.name] = replace(entry, line=task.number)
                return True
        return False

    def count(self, tasks: Iterable[LineTask]) -> int:
        """Return the number of these lines that have been spoken, by this process or by workers."""
        self._read_workers()
        return sum(map(self.has, tasks))

    def add(self, entries: list[JournalEntry]) -> None:
        self._journal.add(entries)
        self._entries |= {_key(entry): entry for entry in entries}

    def settle(self) -> None:
        """Rewrite the manifest with one entry per line, in input order, workers' entries included."""
        self._read_workers()
        entries = sorted(self._entries.values(), key=lambda entry: entry.line)
        atomic_write(self.path, b"".join(entry.encoded() for entry in entries))
        with output_errors(self.out):
            sync_directory(self.out)
            _clear(self.out, WORKERS)

    def _read_workers(self) -> None:
        for journal in self.out.glob(WORKERS):
            self._read(journal)

    def _read(self, path: Path) -> None:
        """Merge the entries of a journal, except invalid lines: every run validates the input again."""
        with output_errors(path), suppress(FileNotFoundError):
            self._entries |= {_key(entry): entry for entry in read_journal(path) if entry.digest is not None}


def _key(entry: JournalEntry) -> str | int:
    """Return the key of an entry: its id, but the line number for an invalid line, whose name another line may use."""
    return entry.line if entry.digest is None else entry.id


def worker_journal(out: Path) -> Journal:
    """Open the journal of a process that writes into the same directory."""
    return Journal(out / f".shoal-{os.getpid()}-{secrets.token_hex(4)}.journal")


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(out / LOCK, wait=False))
        except BlockingIOError:
            raise InvalidRequest(f"another batch is writing to {out}: wait for it or choose another -o") from None
        yield


def _clear(out: Path, pattern: str) -> None:
    for path in out.glob(pattern):
        path.unlink(missing_ok=True)
