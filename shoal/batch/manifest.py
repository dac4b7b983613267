"""What has been done, in `manifest.jsonl`: an entry per line of the input, written when the file it tells of is safe.

While a batch runs, entries are added as lines are done. When it ends, they are put in the order of the input. Workers
on other machines keep journals of their own beside it, which are taken in at the end, or by the next run.
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
    """Of one directory, for one run at a time: see `opened`."""

    def __init__(self, out: Path) -> None:
        self.out, self.path = out, out / MANIFEST
        self._entries: dict[str | int, JournalEntry] = {}  # by `_key`; the newest counts
        self._journal: Journal

    @classmethod
    @contextmanager
    def opened(cls, out: Path) -> Iterator["Manifest"]:
        """Raises InvalidRequest, OutputError. At the end it is settled, however that comes."""
        manifest = cls(out)
        with ExitStack() as files:
            with output_errors(out):
                out.mkdir(parents=True, exist_ok=True)
                files.enter_context(_locked(out))
                _clear(out, PARTIAL_FILES)
            manifest._take(manifest.path)  # before it is opened: that cuts off what is torn, and it may not be ours
            manifest._journal = files.enter_context(closing(Journal(manifest.path)))
            manifest._take_workers()
            try:
                yield manifest
            finally:
                manifest.settle()

    def has(self, task: LineTask) -> bool:
        """Whether this very line has been spoken, and its file is still there, whole."""
        entry = self._entries.get(task.name)
        if entry is None or entry.file is None or entry.digest != task.digest:
            return False
        with suppress(OSError):
            if (self.out / entry.file).stat().st_size == entry.size:
                self._entries[task.name] = replace(entry, line=task.number)
                return True
        return False

    def count(self, tasks: Iterable[LineTask]) -> int:
        """How many of these lines have been spoken, here or by other workers."""
        self._take_workers()
        return sum(map(self.has, tasks))

    def add(self, entries: list[JournalEntry]) -> None:
        self._journal.add(entries)
        self._entries |= {_key(entry): entry for entry in entries}

    def settle(self) -> None:
        """One entry per line, those of other workers among them, in the order of the lines."""
        self._take_workers()
        entries = sorted(self._entries.values(), key=lambda entry: entry.line)
        atomic_write(self.path, b"".join(entry.encoded() for entry in entries))
        with output_errors(self.out):
            sync_directory(self.out)
            _clear(self.out, WORKERS)

    def _take_workers(self) -> None:
        for journal in self.out.glob(WORKERS):
            self._take(journal)

    def _take(self, path: Path) -> None:
        """All but lines that were wrong: every run finds those anew, and some have been put right."""
        with output_errors(path), suppress(FileNotFoundError):
            self._entries |= {_key(entry): entry for entry in read_journal(path) if entry.digest is not None}


def _key(entry: JournalEntry) -> str | int:
    """The id; of a line that is wrong its number, since what it is called may be the id of another line."""
    return entry.line if entry.digest is None else entry.id


def worker_journal(out: Path) -> Journal:
    """For a process that speaks into the same directory."""
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
