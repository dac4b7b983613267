"""Terminal output of `shoal book`: a progress bar with the time left, failed sentences and a summary."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.cli.files.batch_progress import MAX_PRINTED_FAILURES, progress_bar
from shoal.cli.tables import print_json, show_table
from shoal.errors import counted

if TYPE_CHECKING:
    from shoal.batch.journal import JournalEntry
    from shoal.batch.lines import LineTask
    from shoal.book.document import Book
    from shoal.book.speak import BookRun

Place = tuple[int, int]  # chapter and sentence, from 1


class BookProgress:
    """Counts spoken sentences and shows the current chapter and the time left.

    On a terminal it shows a bar, elsewhere a line per completed chapter.
    """

    def __init__(self, *, shown: bool) -> None:
        self._console = Console(stderr=True, quiet=not shown, soft_wrap=True)
        self._bar = progress_bar(self._console, shown=shown)
        self._task = self._bar.add_task("loading the model", total=None)
        self._started: float | None = None  # when the first piece was spoken
        self._missing: dict[Place, set[str]] = {}  # pieces of sentences that are not complete
        self._users: dict[str, list[Place]] = {}  # sentences by piece
        self._unfinished: dict[int, int] = {}  # sentences to speak by chapter
        self._bytes = self._spoken_bytes = 0
        self.sentences = self.done_before = self.chapters = 0
        self.spoken: set[str] = set()  # ids of pieces
        self.failures: dict[str, str] = {}  # messages by id of the piece
        self.audio_seconds = 0.0

    def begin(self, run: "BookRun") -> None:
        """Initialise the counts from a run. The bar counts bytes, since run time is proportional to them."""
        self.spoken = {task.name for task in run.batch.done}
        self.failures = {fault.name: fault.message for fault in run.batch.faults}
        self._bytes = sum(task.size for task in run.batch.tasks)
        self.chapters = len(run.chapters)
        for chapter in run.chapters:
            self.sentences += len(chapter.sentences)
            for each in chapter.sentences:
                self._add((chapter.number, each.sentence.number), {piece.id for piece in each.pieces} - self.spoken)
        self.done_before = self.sentences - len(self._missing)
        self._bar.update(self._task, total=self._bytes or 1)

    def _add(self, place: Place, missing: set[str]) -> None:
        if missing:
            self._missing[place] = missing
            self._unfinished[place[0]] = self._unfinished.get(place[0], 0) + 1
        for id in missing:
            self._users.setdefault(id, []).append(place)

    @property
    def done(self) -> int:
        """Sentences that are spoken, by this run or earlier ones."""
        return self.sentences - len(self._missing)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar within the block; say how to resume when the block is interrupted."""
        try:
            with self._bar:
                yield
        except (KeyboardInterrupt, SystemExit):
            self._console.print(
                f"interrupted: {self.done} of {self.sentences} sentences are done; run the same command again to resume"
            )
            raise

    def record(self, task: "LineTask", entry: "JournalEntry") -> None:
        """Count a piece that was spoken or has failed."""
        self._started = time.monotonic() if self._started is None else self._started
        self._spoken_bytes += task.size
        if entry.status == "failed":
            self.failures[entry.id] = entry.error or "unknown"
        else:
            self.spoken.add(entry.id)
            for place in self._users.get(entry.id, ()):
                self._complete(place, entry.id)
        chapter = next(iter(self._users.get(entry.id, [(0, 0)])))[0]
        text = f"chapter {chapter}, {self.done}/{self.sentences} sentences"
        self._bar.update(self._task, completed=self._spoken_bytes, description=text)

    def _complete(self, place: Place, id: str) -> None:
        self._missing[place].discard(id)
        if self._missing[place]:
            return
        del self._missing[place]
        chapter = place[0]
        self._unfinished[chapter] -= 1
        if not self._unfinished[chapter] and not self._console.is_terminal:
            self._console.print(
                f"chapter {chapter} is spoken; {self.done} of {self.sentences} sentences, about {self.time_left()} left"
            )

    def time_left(self) -> timedelta:
        """Return the estimated remaining time at the speed so far, in whole seconds."""
        elapsed = time.monotonic() - (self._started or time.monotonic())
        rest = self._bytes - self._spoken_bytes
        return timedelta(seconds=round(elapsed * rest / max(1, self._spoken_bytes)))

    def show(self, activity: str) -> None:
        """Show an activity that follows speaking."""
        self._bar.update(self._task, description=activity, completed=self._bytes or 1)

    def print_failures(self) -> None:
        """Print each sentence that could not be spoken, and what to do."""
        failed = [(place, id) for id in self.failures for place in self._users.get(id, ())]
        for (chapter, sentence), id in sorted(failed)[:MAX_PRINTED_FAILURES]:
            self._console.print(f"[red]{chapter}:{sentence}:[/] {escape(self.failures[id])}")
        self._console.print(
            f"{counted(len(failed), 'sentence')} could not be spoken: change the text, try another seed "
            "(--redo CHAPTER:SENTENCE), or leave them out with --skip-failed"
        )

    def report(self, written: list[Path], *, json: bool) -> None:
        """Print the summary, or with `json` its figures on standard output."""
        if json:
            print_json(
                {
                    "files": [str(path) for path in written],
                    "chapters": self.chapters,
                    "sentences": self.sentences,
                    "done_before": self.done_before,
                    "failed": len({place for id in self.failures for place in self._users.get(id, ())}),
                    "audio_seconds": round(self.audio_seconds, 3),
                }
            )
            return
        if self.failures:
            self.print_failures()
        length = timedelta(seconds=round(self.audio_seconds))
        more = f" and {counted(len(written) - 1, 'more file')}" if len(written) > 1 else ""
        self._console.print(
            f"{escape(str(written[0]))}{more}: {counted(self.chapters, 'chapter')}, {counted(self.done, 'sentence')} "
            f"({self.done_before} spoken before), {length} of audio"
        )


def print_list(book: "Book", only: str | None, *, quotes: bool, json: bool) -> None:
    """Print the chapters of a book, or with `only` the numbered sentences of these."""
    from shoal.book.selection import select_chapters
    from shoal.book.work import Narration, Speaker, plan_book

    narration = Narration("", "", Speaker(None), Speaker(None) if quotes else None)
    chapters = select_chapters(plan_book(book, narration, {}), only)
    sentences = [(chapter, each.sentence) for chapter in chapters for each in chapter.sentences]
    if only is not None and not json:
        typer.echo("\n".join(f"{chapter.number}:{each.number}\t{each.text}" for chapter, each in sentences))
        return
    rows = [
        {
            "chapter": chapter.number,
            "title": chapter.title,
            "sentences": len(chapter.sentences),
            "words": sum(len(each.sentence.text.split()) for each in chapter.sentences),
        }
        for chapter in chapters
    ]
    if json:
        print_json({"title": book.title, "author": book.author, "chapters": rows})
    else:
        table = Table(*rows[0], title=escape(f"{book.title}, {book.author}" if book.author else book.title))
        for row in rows:
            table.add_row(*(escape(f"{value}") for value in row.values()))
        show_table(table)
