"""How far a measurement is, and how long it will take; on standard error, where a terminal is."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class BenchProgress:
    """Moves when it is told of something that is done; the total may grow while it is found out."""

    def __init__(self, bar: Progress, total: float) -> None:
        self._bar, self._task = bar, bar.add_task("", total=total)

    def now(self, what: str) -> None:
        self._bar.update(self._task, description=escape(what))

    def done(self, amount: float = 1.0) -> None:
        self._bar.update(self._task, advance=amount)

    def more(self, amount: float) -> None:
        total = self._bar.tasks[self._task].total or 0.0
        self._bar.update(self._task, total=total + amount)


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
