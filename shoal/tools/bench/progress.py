"""Progress bar with remaining time for measurements, on standard error if that is a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class BenchProgress:
    """One task of a progress bar."""

    def __init__(self, bar: Progress, total: float) -> None:
        self._bar, self._task = bar, bar.add_task("", total=total)

    def describe(self, text: str) -> None:
        self._bar.update(self._task, description=escape(text))

    def advance(self, amount: float = 1.0) -> None:
        self._bar.update(self._task, advance=amount)


@contextmanager
def progress_bar(total: float, *, shown: bool) -> Iterator[BenchProgress]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not shown or not console.is_terminal) as bar:
        yield BenchProgress(bar, total)
