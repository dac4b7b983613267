"""Supervisor of the engine process: a device fault kills that process, not the server.

A request belongs to one engine process at a time. When that process dies, requests that have sent no audio are
resubmitted to the next process; the others fail with EngineStopped.

An idle engine may sleep: its process ends, and the next request starts another. The supervisor stays ready meanwhile,
and requests wait until the engine has woken up.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from shoal.engine.process.engine_process import Deliver, EngineJob, EngineProcess, final_error
from shoal.engine.process.logging import write_line
from shoal.engine.process.messages import (
    CancelJob,
    Close,
    Command,
    Decode,
    Dying,
    Encode,
    Failed,
    GetStats,
    Heartbeat,
    JobReply,
    LogLine,
    ModelInfo,
    Ready,
    ReleaseMemory,
    Reply,
    Speak,
)
from shoal.engine.process.replies import ReplyStream, deliver_to, result_value
from shoal.engine.process.worker import EngineSource
from shoal.errors import EngineBusy, EngineStopped, ShoalError
from shoal.speech import AudioChunk, Samples, SamplingParams, SpeechRequest
from shoal.text.prompt import Codes

logger = logging.getLogger(__name__)

Activity = Literal["awake", "asleep", "waking"]

# Time between two checks of the monitor, several times a second, above which this process must have been stopped.
PAUSE_SECONDS = 5.0


@dataclass(frozen=True)
class SupervisorConfig:
    start_seconds: float = 600.0  # time limit for loading and warming up a model
    hang_seconds: float = 60.0  # time without a step, with active jobs, after which the engine is killed
    longest_pause: float = 10.0  # maximum back-off between attempts to start
    attempts: int = 2  # maximum number of engine processes that one request may crash
    max_attempts: int = 5  # maximum number of engine processes for one request if other requests are suspected
    exit_seconds: float = 10.0  # time for an engine without jobs to exit at shutdown
    sleep_seconds: float = 0.0  # time without jobs after which the engine process ends; 0: never


class Supervisor:
    """Runs a `Service` in an engine process, with its interface, and restarts the process. Thread-safe.

    `start` blocks until the engine is ready.
    """

    def __init__(self, source: EngineSource, config: SupervisorConfig | None = None) -> None:
        self.source, self.config = source, config or SupervisorConfig()
        self.restarts = 0
        self.wakes = 0  # starts of the engine after it slept
        self.activity: Activity = "awake"
        self._ids = itertools.count(1)
        self._lock = threading.RLock()
        self._current: EngineProcess | None = None
        self._retiring: list[EngineProcess] = []
        self._starting: list[EngineProcess] = []
        self._queued: list[EngineJob] = []  # jobs that wait for an engine process
        self._model_info: ModelInfo | None = None
        self._closing = False
        self._changed = threading.Condition(self._lock)
        self._failures = 0
        self._used = time.monotonic()  # when the last job was submitted or ended, or an engine became ready
        self._monitor_thread = threading.Thread(target=self._monitor, name="shoal-monitor", daemon=True)

    def start(self) -> None:
        """Start the engine and block until it is ready. Raises the error that kept it from starting."""
        self._start_engine(self.source)
        self._monitor_thread.start()

    @property
    def ready(self) -> bool:
        """Return whether requests are accepted: also while the engine sleeps or wakes up."""
        return (self._loaded or self.activity != "awake") and not self._closing

    @property
    def _loaded(self) -> bool:
        current = self._current
        return current is not None and current.model_info is not None

    @property
    def model_info(self) -> ModelInfo:
        assert self._model_info is not None, "start() comes first"
        return self._model_info

    @property
    def default_sampling(self) -> SamplingParams:
        return self.model_info.default_sampling

    @property
    def default_voice(self) -> str | None:
        return self.model_info.default_voice

    @property
    def sample_rate(self) -> int:
        return self.model_info.sample_rate

    @property
    def process_id(self) -> int | None:
        return self._current.process.pid if self._current is not None else None

    def speak(self, request: SpeechRequest, deadline: float | None = None) -> ReplyStream:
        """Submit a request and return its chunks. Closing the stream cancels the request.

        It is submitted now, not when the first chunk is awaited: while the event loop parses the other requests of a
        burst, the engine computes this one. `deadline` is absolute, in `time.monotonic()` seconds; without it the
        request's timeout starts now. It covers queueing, voice encoding, generation and resubmission to another
        process. Raises EngineBusy and EngineStopped.
        """
        replies: asyncio.Queue[JobReply] = asyncio.Queue()
        deadline = request.deadline_from(time.monotonic()) if deadline is None else deadline
        job = self._submit(Speak(request, deadline), deliver_to(replies))
        return ReplyStream(replies, partial(self._cancel, job))

    async def aencode(self, audio: bytes) -> Codes:
        """Return the codes [codebooks, frames] of a recording. Cancelling removes a call that has not started."""
        codes: Codes = await self._aask(Encode(audio))
        return codes

    async def adecode(self, codes: Codes) -> Samples:
        """Return the samples of codes [codebooks, frames]. Cancelled as in `aencode`."""
        samples: Samples = await self._aask(Decode(codes))
        return samples

    def statistics(self) -> dict[str, Any]:
        """Return the engine's statistics and the supervisor's counters; only the latter while the engine sleeps.

        Blocks; raises EngineStopped if not ready.
        """
        if not self.ready:
            raise EngineStopped("the engine is not ready")
        statistics: dict[str, Any] = self._ask(GetStats()) if self._loaded else {}
        asleep = int(self.activity != "awake")
        return {**statistics, "restarts": self.restarts, "wakes": self.wakes, "asleep": asleep}

    async def release_memory(self) -> dict[str, int]:
        """Drop cached prefixes and return cached memory to device and system; see `Service.release_memory`."""
        if not self.ready:
            raise EngineStopped("the engine is not ready")
        released: dict[str, int] = await self._aask(ReleaseMemory())
        return released

    def reload(self, source: EngineSource) -> None:
        """Start an engine from `source` beside the current one and switch to it; the old one drains. Blocks.

        If the new engine cannot start, raises its error and keeps the old one.
        """
        self._start_engine(source)

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Stop all engine processes; with `drain`, after their active requests. Starting processes are killed."""
        with self._lock:
            self._closing = True
            processes = self._engines()
            for process in self._starting:
                process.kill()
            self._changed.notify_all()
        for process in processes:
            process.send(0, Close(drain, timeout))
        deadline = None if drain and timeout is None else time.monotonic() + (timeout or 0.0) + self.config.exit_seconds
        for process in processes:
            self._await_exit(process, deadline)
        self._fail_all(EngineStopped("the engine was closed"))

    def _await_exit(self, process: EngineProcess, deadline: float | None) -> None:
        """Wait for a process that is closing; kill it when it hangs, and at the deadline in any case."""
        process.busy = time.monotonic()
        while not process.join(0.02):
            now = time.monotonic()
            silent = now - process.last_reply > self.config.exit_seconds
            if silent or self._overdue(process, now) or (deadline is not None and now > deadline):
                logger.error("engine process %s does not exit; killing it", process.process.pid)
                process.kill()
                break
        process.exited.wait(5.0)

    def _overdue(self, process: EngineProcess, now: float) -> bool:
        """Return whether a process that has to drain and exit runs no steps, or has had no jobs for `exit_seconds`."""
        process.busy = now if process.jobs else process.busy
        return self._stalled(process, now) or now - process.busy > self.config.exit_seconds

    def _stalled(self, process: EngineProcess, now: float) -> bool:
        return now - process.progress > self.config.hang_seconds

    def _ask(self, command: Command) -> Any:
        replies: queue.SimpleQueue[JobReply] = queue.SimpleQueue()
        self._submit(command, replies.put)
        return result_value(replies.get())

    async def _aask(self, command: Command) -> Any:
        replies: asyncio.Queue[JobReply] = asyncio.Queue()
        job = self._submit(command, deliver_to(replies))
        try:
            return result_value(await replies.get())
        finally:
            self._cancel(job)  # no effect once the job has been answered

    def _submit(self, command: Command, deliver: Deliver) -> EngineJob:
        config = self.source.config
        with self._lock:
            if self._closing:
                raise EngineStopped("the engine is closed")
            # The server's AdmissionQueue has the same limit, so this check refuses none of its requests: it only bounds
            # the queue of callers without one, such as batches, books and cluster replicas. Other jobs do not count: a
            # pending GetStats would refuse a request that AdmissionQueue has admitted.
            if isinstance(command, Speak) and self._speech_jobs_reach(config.slots + config.max_waiting):
                raise EngineBusy("the queue is full; try again later")
            job = EngineJob(next(self._ids), command, deliver)
            if not isinstance(command, GetStats):
                self._used = time.monotonic()
            self._assign(job)
            self._changed.notify_all()  # wakes a sleeping engine
            return job

    def _engines(self) -> list[EngineProcess]:
        """Return the processes that may have jobs: the current one and those that drain. The lock is held."""
        return [each for each in (self._current, *self._retiring) if each is not None]

    def _jobs(self) -> list[EngineJob]:
        """Return all unanswered jobs, sent to a process or queued. The lock is held."""
        return [*self._queued, *(job for process in self._engines() for job in process.jobs.values())]

    def _speech_jobs_reach(self, limit: int) -> bool:
        """Return whether at least `limit` jobs are requests for speech. Checks each job only if there are so many."""
        jobs = len(self._queued) + sum(len(process.jobs) for process in self._engines())
        return jobs >= limit and sum(isinstance(job.command, Speak) for job in self._jobs()) >= limit

    def _assign(self, job: EngineJob) -> None:
        """Send a job to the current engine, or queue it until there is one. The lock is held."""
        current = self._current
        if current is None or current.model_info is None:
            self._queued.append(job)
            return
        job.attempts += 1
        current.jobs[job.id] = job
        current.send(job.id, job.command)

    def _cancel(self, job: EngineJob) -> None:
        with self._lock:
            if job in self._queued:
                self._queued.remove(job)
            for process in self._engines():
                if process.jobs.pop(job.id, None) is not None:
                    process.send(job.id, CancelJob())

    def _on_reply(self, process: EngineProcess, job_id: int, reply: Reply) -> None:
        """Handle a reply on the receiving thread of its process."""
        if isinstance(reply, Heartbeat):
            process.record_heartbeat(reply)
            self._record_backends(process, reply)
        elif isinstance(reply, Ready):
            with self._lock:
                process.model_info = reply.model_info
                process.progress = time.monotonic()  # the time spent loading is not a hang
                self._changed.notify_all()
        elif isinstance(reply, LogLine):
            self._log(process, job_id, reply)
        elif isinstance(reply, Dying):
            process.blamed = frozenset(reply.blamed)
        elif job_id == 0 and isinstance(reply, Failed):
            self._on_end(process, reply.error)
        else:
            self._deliver(process, job_id, reply)

    def _record_backends(self, process: EngineProcess, heartbeat: Heartbeat) -> None:
        with self._lock:
            info = process.model_info
            if info is not None and info.backends != heartbeat.backends:
                process.model_info = replace(info, backends=heartbeat.backends)
                if process is self._current:
                    self._model_info = process.model_info

    def _log(self, process: EngineProcess, job_id: int, line: LogLine) -> None:
        with self._lock:
            job = process.jobs.get(job_id)
        # A copy, because only one thread at a time can enter a context.
        (Context() if job is None else job.context.copy()).run(write_line, line)

    def _deliver(self, process: EngineProcess, job_id: int, reply: JobReply) -> None:
        with self._lock:
            job = process.jobs.get(job_id)
            if job is None:
                return  # the job was cancelled
            job.replied = True
            if not isinstance(reply, AudioChunk) or reply.finish is not None:
                del process.jobs[job_id]
                if not isinstance(job.command, GetStats):
                    self._used = time.monotonic()
        job.deliver(reply)

    def _on_end(self, process: EngineProcess, error: ShoalError) -> None:
        """Record why a process cannot start; once it has exited, resubmit its jobs or fail them."""
        with self._lock:
            process.start_error = process.start_error or error
            if not process.exited.is_set():
                return
            process.model_info = None
            lost_jobs, process.jobs = list(process.jobs.values()), {}
            self._retiring = [each for each in self._retiring if each is not process]
            limits = self.config.attempts, self.config.max_attempts
            errors = [final_error(job, process.blamed, *limits, closing=self._closing) for job in lost_jobs]
            for job, final in zip(lost_jobs, errors, strict=True):
                if final is None:
                    self._replay(process, job)
            self._changed.notify_all()
        for job, final in zip(lost_jobs, errors, strict=True):
            if final is not None:
                job.deliver(Failed(final))

    def _replay(self, process: EngineProcess, job: EngineJob) -> None:
        """Resubmit a job of a dead process; the next process starts it alone if it may have caused the crash."""
        blamed = process.blamed is None or job.id in process.blamed
        if blamed and isinstance(job.command, Speak):
            job.command = replace(job.command, replayed=True)
        self._assign(job)

    def _start_engine(self, source: EngineSource, *, if_none_alive: bool = False) -> None:
        """Start an engine and make it the current one when it is ready; the previous one drains.

        With `if_none_alive` the new one is retired if another has become current in the meantime. Raises the error
        that kept it from starting, or EngineStopped if the supervisor was closed.
        """
        fresh = EngineProcess(source, self._on_reply)
        with self._registered_as_starting(fresh):
            info = self._await_ready(fresh)
        with self._lock:
            if self._closing:
                fresh.kill()
                raise EngineStopped("the engine was closed")
            if if_none_alive and self._alive():
                self._retire(fresh)
                return
            old, self._current, self.source, self._failures = self._current, fresh, source, 0
            # Not when the engine reports it: until here another engine speaks, perhaps with another model.
            self._model_info = fresh.model_info or info
            self.activity, self._used = "awake", time.monotonic()
            if old is not None and old.alive:
                self._retire(old)
            waiting, self._queued = self._queued, []
            for job in waiting:
                self._assign(job)

    @contextmanager
    def _registered_as_starting(self, process: EngineProcess) -> Iterator[None]:
        """Let `close` find and kill the process while it starts."""
        with self._lock:
            self._starting.append(process)
            if self._closing:
                process.kill()
        try:
            yield
        finally:
            with self._lock:
                self._starting.remove(process)

    def _alive(self) -> bool:
        return self._current is not None and self._current.alive

    def _retire(self, process: EngineProcess) -> None:
        """Let a process drain and exit. The lock is held."""
        self._retiring.append(process)
        process.busy = time.monotonic()
        process.send(0, Close(drain=True, timeout=None))

    def _await_ready(self, process: EngineProcess) -> ModelInfo:
        deadline = time.monotonic() + self.config.start_seconds
        with self._changed:
            while process.model_info is None and not process.exited.is_set() and time.monotonic() < deadline:
                self._changed.wait(0.5)
            info = process.model_info
        if info is None:
            process.kill()
            raise process.start_error or EngineStopped(f"the engine was not ready in {self.config.start_seconds:g} s")
        return info

    def _monitor(self) -> None:
        """Restart an engine that died and kill those that hang, retiring ones too, until the supervisor is closed."""
        checked = time.monotonic()
        while not self._closing:
            checked = self._kill_hanging(checked)
            with self._lock:
                current, asleep = self._current, self.activity == "asleep"
            if asleep:
                self._wake_for_work()
            elif self._fall_asleep():
                logger.info("stopping the engine process after %g s without requests", self.config.sleep_seconds)
            elif current is None or current.exited.wait(0.1):
                self._restart(current)

    def _kill_hanging(self, checked: float) -> float:
        """Kill engines that hang; their jobs are replayed or fail when the process has exited.

        `checked` is the time of the last check; returns that of this one. If this process was stopped in between
        (Ctrl-Z, a paused container), so were the engines: they hang only if they make no progress from now on.
        """
        now = time.monotonic()
        with self._lock:
            current, engines = self._current, self._engines()
            for process in engines if now - checked > PAUSE_SECONDS else ():
                process.progress = process.busy = now
            overdue = [process for process in self._retiring if process.alive and self._overdue(process, now)]
        for process in overdue:
            logger.error("retiring engine process %s hangs; killing it", process.process.pid)
            process.kill()
        if current is not None and current.alive and current.jobs and self._stalled(current, now):
            logger.error("no engine step for %.0f s; killing the engine process", self.config.hang_seconds)
            current.kill()
            current.exited.wait()
        return now

    def _fall_asleep(self) -> bool:
        """End the engine process if it has been idle for `sleep_seconds`."""
        with self._lock:
            current, idle = self._current, time.monotonic() - self._used
            if not self.config.sleep_seconds or idle < self.config.sleep_seconds or current is None:
                return False
            # A start in progress is a reload, which the operator waits for.
            if not current.alive or self._jobs() or self._starting or self._closing:
                return False
            self._current, self.activity = None, "asleep"
            self._retire(current)
            return True

    def _wake_for_work(self) -> None:
        """Wait up to 0.5 s for a job while the engine sleeps, and start the engine if there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._closing or self.activity != "asleep", timeout=0.5)
            if not self._queued or self._closing or self.activity != "asleep":
                return
            self.activity = "waking"
            self.wakes += 1
        logger.info("starting the engine process for a new request")
        self._start_again()

    def _restart(self, ended: EngineProcess | None) -> None:
        """Replace an engine that ended, unless a reload has already replaced that one."""
        if self._closing or self._current is not ended:
            return
        self.restarts += 1
        logger.warning("engine process exited; restarting it (restart %d)", self.restarts)
        self._start_again()

    def _start_again(self) -> None:
        """Start an engine after the last one has ended. If that fails, fail the waiting jobs and pause."""
        try:
            self._start_engine(self.source, if_none_alive=True)
        except ShoalError as error:
            if self._closing or self._alive():
                return
            self._failures += 1
            self.activity = "awake"  # not ready until an attempt of `_restart` succeeds
            logger.error("engine process cannot start: %s", error)
            # The cause may name files of this machine, so it is logged and not sent to clients.
            self._fail_queued(EngineStopped("the engine cannot start at the moment; try again later"))
            time.sleep(min(0.1 * 2**self._failures, self.config.longest_pause))

    def _fail_queued(self, error: ShoalError) -> None:
        """Fail the jobs that wait for an engine process. Retiring ones finish theirs."""
        with self._lock:
            jobs, self._queued = self._queued, []
        for job in jobs:
            job.deliver(Failed(error))

    def _fail_all(self, error: ShoalError) -> None:
        with self._lock:
            for process in self._engines():
                self._queued += process.jobs.values()
                process.jobs = {}
        self._fail_queued(error)
