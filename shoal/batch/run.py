"""Run a batch: validate the input, speak the lines that are not done, record the results."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from shoal.api.engine_client import EngineHandle
from shoal.batch.journal import JournalEntry
from shoal.batch.lines import InputFile, LineError, LineTask, is_plain_text
from shoal.batch.manifest import Manifest
from shoal.batch.speaker import LineSpeaker
from shoal.errors import InvalidRequest


@dataclass(frozen=True)
class BatchPlan:
    """Lines of an input, divided by what is to be done with them."""

    tasks: list[LineTask] = field(default_factory=list)
    faults: list[LineError] = field(default_factory=list)
    done: list[LineTask] = field(default_factory=list)  # spoken by earlier runs

    @property
    def size(self) -> int:
        """Bytes of all lines to speak: the basis of the time estimate."""
        return sum(task.size for task in self.tasks)


Add = Callable[[list[JournalEntry]], None]


class ProgressCallback(Protocol):
    """Called after each line, with its journal entry."""

    def __call__(self, task: LineTask, entry: JournalEntry) -> None: ...


def plan_batch(lines: InputFile, manifest: Manifest) -> BatchPlan:
    """Validate the whole input and record invalid lines in the manifest. Raises InvalidRequest for an empty input."""
    found = BatchPlan()
    for each in lines.tasks():
        if isinstance(each, LineError):
            found.faults.append(each)
        else:
            (found.done if manifest.has(each) else found.tasks).append(each)
    if not (found.tasks or found.faults or found.done):
        expected = "text" if is_plain_text(lines.path) else "JSON object"
        raise InvalidRequest(f"{lines.path} is empty: write one {expected} per line")
    if found.faults:
        manifest.add([JournalEntry(fault.number, fault.name, "failed", error=fault.message) for fault in found.faults])
    return found


def run(
    found: BatchPlan,
    lines: InputFile,
    loaded: EngineHandle,
    manifest: Manifest,
    in_flight: int,
    watch: ProgressCallback,
) -> None:
    """Speak the remaining lines, `in_flight` at a time. After an interrupt the manifest holds all finished lines."""
    tasks = ((task, lines.raw(task)) for task in found.tasks)
    speaker = LineSpeaker(loaded, manifest.out, lines.defaults)
    asyncio.run(speak_all(tasks, speaker, manifest.add, in_flight, watch))


async def speak_all(
    tasks: Iterator[tuple[LineTask, bytes]], speaker: LineSpeaker, add: Add, in_flight: int, watch: ProgressCallback
) -> None:
    """Speak all tasks; call `watch` for a line after its entry is synced. Raises OutputError."""
    journal = GroupCommit(add)

    async def worker() -> None:
        for task, raw in tasks:
            entry = await speaker.speak(task, raw)
            await journal.append(entry)
            watch(task, entry)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(worker())
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    finally:
        journal.close()


class GroupCommit:
    """Group commit: entries that arrive during a sync share the next one, because a GPU outpaces single disk syncs."""

    def __init__(self, add: Add) -> None:
        self._add = add
        self._lock = asyncio.Lock()
        self._pending: list[JournalEntry] = []

    async def append(self, entry: JournalEntry) -> None:
        """Return when the entry is synced. Raises OutputError."""
        self._pending.append(entry)
        async with self._lock:
            # The previous holder of the lock may have written this entry.
            if entry in self._pending:
                entries, self._pending = self._pending, []
                await asyncio.to_thread(self._add, entries)

    def close(self) -> None:
        """Write the entries of lines that finished just before an interrupt."""
        if self._pending:
            self._add(self._pending)
