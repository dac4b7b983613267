"""A batch from its input to its end: plan_batch, speak what is missing, keep the books."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from shoal.api.engine_client import EngineHandle
from shoal.batch.journal import JournalEntry
from shoal.batch.lines import InputFile, LineError, LineTask
from shoal.batch.manifest import Manifest
from shoal.batch.speaker import LineSpeaker
from shoal.errors import InvalidRequest


@dataclass(frozen=True)
class BatchPlan:
    """What there is to do."""

    tasks: list[LineTask] = field(default_factory=list)
    faults: list[LineError] = field(default_factory=list)
    done: list[LineTask] = field(default_factory=list)  # by earlier runs

    @property
    def size(self) -> int:
        """Bytes of all lines that are to be spoken: what best tells how long it will take."""
        return sum(task.size for task in self.tasks)


Add = Callable[[list[JournalEntry]], None]


class ProgressCallback(Protocol):
    """Whoever wants to see what comes of the lines, as it comes."""

    def __call__(self, task: LineTask, entry: JournalEntry) -> None: ...


def plan_batch(lines: InputFile, manifest: Manifest) -> BatchPlan:
    """Read the whole input once. Lines that are wrong are in the manifest when this returns."""
    found = BatchPlan()
    for each in lines.tasks():
        if isinstance(each, LineError):
            found.faults.append(each)
        else:
            (found.done if manifest.has(each) else found.tasks).append(each)
    if not (found.tasks or found.faults or found.done):
        raise InvalidRequest(f"{lines.path} is empty: give it one JSON object per line")
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
    """Speak what is missing, `in_flight` lines at a time. An interrupt leaves what is in the manifest."""
    tasks = ((task, lines.raw(task)) for task in found.tasks)
    speaker = LineSpeaker(loaded, manifest.out, lines.defaults)
    asyncio.run(speak_all(tasks, speaker, manifest.add, in_flight, watch))


async def speak_all(
    tasks: Iterator[tuple[LineTask, bytes]], speaker: LineSpeaker, add: Add, in_flight: int, watch: ProgressCallback
) -> None:
    """Every line is in the books when it is watched. Raises OutputError."""
    books = GroupCommit(add)

    async def go_on() -> None:
        for task, raw in tasks:
            entry = await speaker.speak(task, raw)
            await books.enter(entry)
            watch(task, entry)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(go_on())
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    finally:
        books.close()


class GroupCommit:
    """Entries that come together are synced together: a disk syncs less often than a GPU speaks lines."""

    def __init__(self, add: Add) -> None:
        self._add = add
        self._turn = asyncio.Lock()
        self._waiting: list[JournalEntry] = []

    async def enter(self, entry: JournalEntry) -> None:
        """Returns when the entry is safe. Raises OutputError."""
        self._waiting.append(entry)
        async with self._turn:
            # Whoever had the turn before may have written this one, too.
            if entry in self._waiting:
                entries, self._waiting = self._waiting, []
                await asyncio.to_thread(self._add, entries)

    def close(self) -> None:
        """What was spoken when the run was interrupted is kept."""
        if self._waiting:
            self._add(self._waiting)
