"""JobRunner of the engine process, by number: tasks on an event loop, which has a thread of its own.

A task that waits holds no thread, so that one whose voice is being encoded is in nobody's way, and one that nobody
wants any more is gone from wherever it waits.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

Work = Callable[[], Coroutine[None, None, None]]


class JobRunner:
    """For every thread but its own. Lasts as long as the process."""

    def __init__(self, threads: int) -> None:
        """`threads` is how many `asyncio.to_thread` has for all jobs together."""
        self._tasks: dict[int, asyncio.Task[None]] = {}  # touched by the event loop only
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="shoal-prepare"))
        threading.Thread(target=self._loop.run_forever, name="shoal-jobs", daemon=True).start()

    def begin(self, job: int, work: Work) -> None:
        self._loop.call_soon_threadsafe(self._begin, job, work)

    def cancel(self, job: int) -> None:
        """JobRunner that have ended, or were never started, are left alone."""
        self._loop.call_soon_threadsafe(self._cancel, job)

    def wait(self, seconds: float | None) -> None:
        """Until all that have started have ended, or the time is up."""
        asyncio.run_coroutine_threadsafe(self._wait(seconds), self._loop).result()

    def cancel_all(self) -> list[int]:
        """Those that had not ended."""
        return asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()

    def _begin(self, job: int, work: Work) -> None:
        self._tasks[job] = task = self._loop.create_task(work())
        task.add_done_callback(lambda _: self._tasks.pop(job))

    def _cancel(self, job: int) -> None:
        if job in self._tasks:
            self._tasks[job].cancel()

    async def _wait(self, seconds: float | None) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds)

    async def _cancel_all(self) -> list[int]:
        jobs = list(self._tasks)
        for job in jobs:
            self._cancel(job)
        return jobs
