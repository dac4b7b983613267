"""Jobs of the engine process: asyncio tasks by job id, on an event loop with its own thread.

A job that waits holds no thread, so a job whose voice is being encoded delays no other job, and a cancelled job stops
wherever it waits.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

JobCoroutine = Callable[[], Coroutine[None, None, None]]


class JobRunner:
    """Starts, cancels and awaits jobs from threads other than its own. Lives as long as the process."""

    def __init__(self, threads: int) -> None:
        """Create the event loop; `threads` is the size of the pool that all jobs share in `asyncio.to_thread`."""
        self._tasks: dict[int, asyncio.Task[None]] = {}  # accessed on the event loop only
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="shoal-prepare"))
        threading.Thread(target=self._loop.run_forever, name="shoal-jobs", daemon=True).start()

    def start(self, job: int, work: JobCoroutine) -> None:
        self._loop.call_soon_threadsafe(self._start, job, work)

    def cancel(self, job: int) -> None:
        """Cancel a job; unknown and finished jobs are ignored."""
        self._loop.call_soon_threadsafe(self._cancel, job)

    def wait(self, seconds: float | None) -> None:
        """Block until all started jobs have ended, at most `seconds`."""
        asyncio.run_coroutine_threadsafe(self._wait(seconds), self._loop).result()

    def cancel_all(self) -> list[int]:
        """Cancel all jobs and return the ids of those that had not ended."""
        return asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()

    def _start(self, job: int, work: JobCoroutine) -> None:
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
