"""What is seen of a batch: faults as they are found, a bar while lines are spoken, the sum at the end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from shoal.batch.journal import JournalEntry
    from shoal.batch.lines import LineTask
    from shoal.batch.run import BatchPlan

# Of faults that are the same in every line a few are enough; the manifest has all.
MOST_FAULTS = 20


class BatchProgress:
    def __init__(self, *, shown: bool) -> None:
        self._console = Console(stderr=True, quiet=not shown, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not shown or not self._console.is_terminal,
        )
        self._task = TaskID(0)
        self._lines = self._told = 0
        self._began = time.monotonic()
        self.before = self.done = self.failed = 0
        self.audio_seconds = 0.0

    def surveyed(self, found: "BatchPlan") -> None:
        self.before = len(found.done)
        self._lines = len(found.tasks)
        for fault in found.faults:
            self._fail(fault.number, fault.message)
        # By bytes, not by lines: how long a text is tells best how long it takes.
        self._task = self._bar.add_task("loading the model", total=sum(task.size for task in found.tasks))

    def begin(self) -> None:
        """Everything is loaded: speed and time are counted from now on."""
        self._began = time.monotonic()
        self._bar.reset(self._task, description="reading the first lines")

    @contextmanager
    def drawn(self, kept: Callable[[], int]) -> Iterator[None]:
        """While lines are spoken. An interrupt is told how many are `kept`: workers are ahead of what was heard."""
        self.begin()
        self._bar.update(self._task, description="loading the model")
        try:
            with self._bar:
                yield
        except (KeyboardInterrupt, SystemExit):
            self._console.print(
                f"stopped: {kept()} of {self.before + self._lines} lines are done and kept; the same command goes on"
            )
            raise

    def heard(self, task: "LineTask", entry: "JournalEntry") -> None:
        if entry.status == "failed":
            self._fail(entry.line, entry.error or "unknown")
        else:
            self.done += 1
            self.audio_seconds += entry.audio_seconds or 0.0
        self._bar.update(self._task, advance=task.size, description=f"{self.done}/{self._lines} lines, {self._speed()}")

    def as_json(self) -> dict[str, object]:
        return {
            "done": self.done,
            "done_before": self.before,
            "failed": self.failed,
            "audio_seconds": round(self.audio_seconds, 3),
            "wall_seconds": round(self._wall, 3),
        }

    def sum_up(self, output: Path) -> None:
        before = f", {self.before} were done before" if self.before else ""
        failed = f", [red]{self.failed} failed[/] (see manifest.jsonl)" if self.failed else ""
        self._console.print(f"{escape(str(output))}: {self.done} lines, {self._speed()}{before}{failed}")

    @property
    def _wall(self) -> float:
        return time.monotonic() - self._began

    def _speed(self) -> str:
        return f"{self.audio_seconds:.1f} s of speech at {self.audio_seconds / max(self._wall, 1e-9):.1f} s/s"

    def _fail(self, line: int, message: str) -> None:
        self.failed += 1
        if self.failed <= MOST_FAULTS:
            self._console.print(f"[red]line {line}:[/] {escape(message)}")
        elif self.failed == MOST_FAULTS + 1:
            self._console.print("further lines that fail are only in manifest.jsonl")
