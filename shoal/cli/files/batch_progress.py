"""Terminal output of `shoal batch`: failed lines, a progress bar and a summary, all on standard error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shoal.errors import counted

if TYPE_CHECKING:
    from shoal.batch.journal import JournalEntry
    from shoal.batch.lines import LineTask
    from shoal.batch.run import BatchPlan

# Failures printed to the terminal; the manifest lists all of them.
MAX_PRINTED_FAILURES = 20


def progress_bar(console: Console, *, shown: bool) -> Progress:
    """Return a bar with the time elapsed and the time left, disabled where the console is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not shown or not console.is_terminal,
    )


class BatchProgress:
    """Counts finished and failed lines and shows them. `done_before` lines were finished by an earlier run."""

    def __init__(self, *, shown: bool) -> None:
        self._console = Console(stderr=True, quiet=not shown, soft_wrap=True)
        self._bar = progress_bar(self._console, shown=shown)
        self._task = TaskID(0)
        self._lines = 0
        self._started = time.monotonic()
        self.done_before = self.done = self.failed = 0
        self.audio_seconds = 0.0

    def add_plan(self, found: "BatchPlan") -> None:
        """Initialise the counts from the plan of the input and print invalid lines."""
        self.done_before = len(found.done)
        self._lines = len(found.tasks)
        for fault in found.faults:
            self._fail(fault.number, fault.message)
        # The bar counts bytes, not lines, because run time is proportional to the length of the text.
        self._task = self._bar.add_task("loading the model", total=sum(task.size for task in found.tasks))

    def begin(self) -> None:
        """Restart the clock: the model is loaded and generation begins."""
        self._started = time.monotonic()
        self._bar.reset(self._task, description="reading the first lines")

    @contextmanager
    def shown(self, count_done: Callable[[], int]) -> Iterator[None]:
        """Show the bar within the block. `count_done` counts the finished lines when the block is interrupted:
        workers may have written more lines than they have reported.
        """
        self.begin()
        self._bar.update(self._task, description="loading the model")
        try:
            with self._bar:
                yield
        except (KeyboardInterrupt, SystemExit):
            lines = counted(self.done_before + self._lines, "line is", "lines are")
            self._console.print(f"interrupted: {count_done()} of {lines} done; run the same command again to resume")
            raise

    def record(self, task: "LineTask", entry: "JournalEntry") -> None:
        """Count one line that has finished or failed."""
        if entry.status == "failed":
            self._fail(entry.line, entry.error or "unknown")
        else:
            self.done += 1
            self.audio_seconds += entry.audio_seconds or 0.0
        self._bar.update(
            self._task, advance=task.size, description=f"{self.done} of {counted(self._lines, 'line')}, {self._speed()}"
        )

    def as_json(self) -> dict[str, object]:
        return {
            "done": self.done,
            "done_before": self.done_before,
            "failed": self.failed,
            "audio_seconds": round(self.audio_seconds, 3),
            "wall_seconds": round(self._wall, 3),
        }

    def print_summary(self, output: Path) -> None:
        before = f", {self.done_before} already done" if self.done_before else ""
        failed = f", [red]{self.failed} failed[/] (see manifest.jsonl)" if self.failed else ""
        self._console.print(f"{escape(str(output))}: {counted(self.done, 'line')}, {self._speed()}{before}{failed}")

    @property
    def _wall(self) -> float:
        return time.monotonic() - self._started

    def _speed(self) -> str:
        return f"{self.audio_seconds:.1f} s of speech at {self.audio_seconds / max(self._wall, 1e-9):.1f} s/s"

    def _fail(self, line: int, message: str) -> None:
        self.failed += 1
        if self.failed <= MAX_PRINTED_FAILURES:
            self._console.print(f"[red]line {line}:[/] {escape(message)}")
        elif self.failed == MAX_PRINTED_FAILURES + 1:
            self._console.print("more lines failed; manifest.jsonl lists them all")
