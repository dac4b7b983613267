"""A batch from its input to its end: survey, speak what is missing, keep the books."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from shoal.api.engine_client import Loaded
from shoal.batch.journal import Entry
from shoal.batch.lines import Fault, Input, Task
from shoal.batch.manifest import Manifest
from shoal.batch.speaker import Speaker
from shoal.errors import InvalidRequest


@dataclass(frozen=True)
class Survey:
    """What there is to do."""

    tasks: list[Task] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    done: list[Task] = field(default_factory=list)  # by earlier runs

    @property
    def size(self) -> int:
        """Bytes of all lines that are to be spoken: what best tells how long it will take."""
        return sum(task.size for task in self.tasks)


Add = Callable[[list[Entry]], None]


class Watcher(Protocol):
    """Whoever wants to see what comes of the lines, as it comes."""

    def __call__(self, task: Task, entry: Entry) -> None: ...


def survey(lines: Input, manifest: Manifest) -> Survey:
    """Read the whole input once. Lines that are wrong are in the manifest when this returns."""
    found = Survey()
    for each in lines.tasks():
        if isinstance(each, Fault):
            found.faults.append(each)
        else:
            (found.done if manifest.has(each) else found.tasks).append(each)
    if not (found.tasks or found.faults or found.done):
        raise InvalidRequest(f"{lines.path} is empty: give it one JSON object per line")
    if found.faults:
        manifest.add([Entry(fault.number, fault.name, "failed", error=fault.message) for fault in found.faults])
    return found


def run(found: Survey, lines: Input, loaded: Loaded, manifest: Manifest, in_flight: int, watch: Watcher) -> None:
    """Speak what is missing, `in_flight` lines at a time. An interrupt leaves what is in the manifest."""
    tasks = ((task, lines.raw(task)) for task in found.tasks)
    speaker = Speaker(loaded, manifest.out, lines.defaults)
    asyncio.run(speak_all(tasks, speaker, manifest.add, in_flight, watch))


async def speak_all(
    tasks: Iterator[tuple[Task, bytes]], speaker: Speaker, add: Add, in_flight: int, watch: Watcher
) -> None:
    """Every line is in the books when it is watched. Raises OutputError."""
    books = Books(add)

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


class Books:
    """Entries that come together are synced together: a disk syncs less often than a GPU speaks lines."""

    def __init__(self, add: Add) -> None:
        self._add = add
        self._turn = asyncio.Lock()
        self._waiting: list[Entry] = []

    async def enter(self, entry: Entry) -> None:
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
