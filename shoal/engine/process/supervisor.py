"""The engine in a process of its own, watched: a fault of the device ends that process, not the server.

A request belongs to one engine process at a time. When that dies, requests that have sent no audio are given to the
next one as if they had just come, since nobody has heard anything of them; the others end with a clear error.
"""

import asyncio
import itertools
import logging
import multiprocessing
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.engine.process.logging import write_line
from shoal.engine.process.messages import (
    Answer,
    Cancel,
    Close,
    Decode,
    Encode,
    Failed,
    GetStats,
    Heartbeat,
    LogLine,
    ModelInfo,
    Order,
    Ready,
    Reply,
    Speak,
    Spoken,
)
from shoal.engine.process.worker import EngineSource, run_worker
from shoal.errors import EngineBusy, EngineStopped, ShoalError
from shoal.speech import AudioChunk, Samples, SamplingParams, SpeechRequest
from shoal.text.prompt import Codes

logger = logging.getLogger(__name__)

Deliver = Callable[[Spoken | Answer | Failed], None]


@dataclass(frozen=True)
class SupervisorConfig:
    start_seconds: float = 600.0  # to load a model and warm up
    hang_seconds: float = 60.0  # without a step while there is work
    longest_pause: float = 10.0  # between attempts to start
    attempts: int = 2  # engines one request may be given to: one that kills them must not kill them for ever


@dataclass(slots=True, eq=False)
class Job:
    """A caller's order and how to answer it."""

    id: int
    order: Order
    deliver: Deliver
    since: float
    attempts: int = 0
    heard: bool = False  # audio has left
    context: Context = field(default_factory=copy_context)  # of the caller: lines of the log are written as if there


class EngineProcess:
    """One engine process: its pipe, its jobs, and the threads that listen to it and tell it."""

    def __init__(self, source: EngineSource, on_reply: Callable[["EngineProcess", int, Reply], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        level = logging.getLogger("shoal").getEffectiveLevel()
        self.process = context.Process(
            target=run_worker, args=(theirs, source, level), name="shoal-engine", daemon=True
        )
        self.process.start()
        theirs.close()
        self.jobs: dict[int, Job] = {}
        self.model_info: ModelInfo | None = None
        self.problem: ShoalError | None = None  # why it could not start
        self.steps = 0
        self.progress = time.monotonic()  # when it last stepped, or had nothing to do
        self.started = self.progress
        self._orders: queue.SimpleQueue[tuple[int, Order] | None] = queue.SimpleQueue()
        self._on_reply = on_reply
        self.gone = threading.Event()
        threading.Thread(target=self._listen, name="shoal-listen", daemon=True).start()
        threading.Thread(target=self._tell, name="shoal-tell", daemon=True).start()

    @property
    def lives(self) -> bool:
        return not self.gone.is_set()

    def send(self, job: int, order: Order) -> None:
        """AttentionMetadata an order on, without waiting for anybody to read it: it may be an event loop that sends.

        A dead process takes none; the listening thread deals with that.
        """
        self._orders.put((job, order))

    def kill(self) -> None:
        self.process.kill()

    def join(self, timeout: float | None = None) -> bool:
        self.process.join(timeout)
        return self.process.exitcode is not None

    def beat(self, beat: Heartbeat) -> None:
        if beat.active == 0 or beat.steps != self.steps:
            self.progress = time.monotonic()
        self.steps = beat.steps

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                job, reply = self._pipe.recv()
                self._on_reply(self, job, reply)
        self.process.join()
        self.gone.set()
        self._orders.put(None)
        self._on_reply(self, 0, Failed(EngineStopped(f"the engine process ended with code {self.process.exitcode}")))

    def _tell(self) -> None:
        with suppress(OSError):
            while (order := self._orders.get()) is not None:
                self._pipe.send(order)


class Supervisor:
    """The interface of `Service` across a process boundary. `start` waits until the engine is ready."""

    def __init__(self, source: EngineSource, config: SupervisorConfig | None = None) -> None:
        self.source, self.config = source, config or SupervisorConfig()
        self.restarts = 0
        self._ids = itertools.count(1)
        self._lock = threading.RLock()
        self._current: EngineProcess | None = None
        self._retiring: list[EngineProcess] = []
        self._starting: list[EngineProcess] = []
        self._queued: list[Job] = []  # jobs that wait for an engine
        self._model_info: ModelInfo | None = None
        self._closing = False
        self._changed = threading.Condition(self._lock)
        self._failures = 0
        self._watch = threading.Thread(target=self._monitor, name="shoal-watch", daemon=True)

    def start(self) -> None:
        """Start the engine and wait for it. Raises what kept it from starting."""
        self._start_engine(self.source)
        self._watch.start()

    @property
    def ready(self) -> bool:
        current = self._current
        return current is not None and current.model_info is not None and not self._closing

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

    async def speak(self, request: SpeechRequest) -> AsyncGenerator[AudioChunk, None]:
        """Chunks as they are made; leaving the generator cancels."""
        replies: asyncio.Queue[Spoken | Answer | Failed] = asyncio.Queue()
        job, ended = self._submit(Speak(request), _from_thread(replies)), False
        try:
            while not ended:
                chunk = _chunk(await replies.get())
                ended = chunk.finish is not None
                yield chunk
        except ShoalError:
            ended = True
            raise
        finally:
            if not ended:
                self._cancel(job)

    async def aencode(self, audio: bytes) -> Codes:
        """The codes [codebooks, frames] of a recording; leaving cancels, and what has not started then never does."""
        codes: Codes = await self._aask(Encode(audio))
        return codes

    async def adecode(self, codes: Codes) -> Samples:
        """The samples of codes [codebooks, frames]; leaving cancels in the same way."""
        samples: Samples = await self._aask(Decode(codes))
        return samples

    def statistics(self) -> dict[str, Any]:
        if not self.ready:
            raise EngineStopped("the engine is not ready")
        figures: dict[str, Any] = self._ask(GetStats())
        return {**figures, "restarts": self.restarts}

    def reload(self, source: EngineSource) -> None:
        """Another model, or the same anew: started beside the old one, which speaks what it has to its end."""
        self._start_engine(source)

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Stop; with `drain`, after what has been taken is spoken. One that is still starting is ended at once."""
        with self._lock:
            self._closing = True
            processes = [each for each in (self._current, *self._retiring) if each is not None]
            for process in self._starting:
                process.kill()
            self._changed.notify_all()
        for process in processes:
            process.send(0, Close(drain, timeout))
        patience = None if drain and timeout is None else (timeout or 10.0) + 10.0
        for process in processes:
            if not process.join(patience):
                process.kill()
            process.gone.wait(5.0)
        self._fail_all(EngineStopped("the engine was closed"))

    def _ask(self, order: Order) -> Any:
        replies: queue.SimpleQueue[Spoken | Answer | Failed] = queue.SimpleQueue()
        self._submit(order, replies.put)
        return _value(replies.get())

    async def _aask(self, order: Order) -> Any:
        replies: asyncio.Queue[Spoken | Answer | Failed] = asyncio.Queue()
        job = self._submit(order, _from_thread(replies))
        try:
            return _value(await replies.get())
        finally:
            self._cancel(job)  # nothing, if it has been answered

    def _submit(self, order: Order, deliver: Deliver) -> Job:
        config = self.source.config
        with self._lock:
            if self._closing:
                raise EngineStopped("the engine is closed")
            if isinstance(order, Speak) and self._live() >= config.slots + config.max_waiting:
                raise EngineBusy("the queue is full; try again later")
            job = Job(next(self._ids), order, deliver, time.monotonic())
            self._place(job)
            return job

    def _live(self) -> int:
        processes = [each for each in (self._current, *self._retiring) if each is not None]
        return len(self._queued) + sum(len(process.jobs) for process in processes)

    def _place(self, job: Job) -> None:
        """Give a job to the engine, or let it wait for one. Under the lock."""
        current = self._current
        if current is None or current.model_info is None:
            self._queued.append(job)
            return
        job.attempts += 1
        current.jobs[job.id] = job
        current.send(job.id, self._remaining(job))

    def _remaining(self, job: Job) -> Order:
        """The order with the time it has left, for it may have waited or been given to another engine before."""
        if isinstance(job.order, Speak) and job.order.request.timeout is not None:
            left = job.order.request.timeout - (time.monotonic() - job.since)
            return Speak(replace(job.order.request, timeout=max(left, 1e-3)))
        return job.order

    def _cancel(self, job: Job) -> None:
        with self._lock:
            if job in self._queued:
                self._queued.remove(job)
            for process in (self._current, *self._retiring):
                if process is not None and process.jobs.pop(job.id, None) is not None:
                    process.send(job.id, Cancel())

    def _on_reply(self, process: EngineProcess, number: int, reply: Reply) -> None:
        """Called on a process's listening thread."""
        if isinstance(reply, Heartbeat):
            process.beat(reply)
        elif isinstance(reply, Ready):
            with self._lock:
                process.model_info = self._model_info = reply.model_info
                process.progress = time.monotonic()  # loading is no hang
                self._changed.notify_all()
        elif isinstance(reply, LogLine):
            self._log(process, number, reply)
        elif number == 0 and isinstance(reply, Failed):
            self._on_end(process, reply.error)
        else:
            self._deliver(process, number, reply)

    def _log(self, process: EngineProcess, number: int, line: LogLine) -> None:
        with self._lock:
            job = process.jobs.get(number)
        # Its own copy: a context is entered by one thread at a time.
        (Context() if job is None else job.context.copy()).run(write_line, line)

    def _deliver(self, process: EngineProcess, number: int, reply: Spoken | Answer | Failed) -> None:
        with self._lock:
            job = process.jobs.get(number)
            if job is None:
                return  # cancelled meanwhile
            job.heard = True
            if not isinstance(reply, Spoken) or reply.chunk.finish is not None:
                del process.jobs[number]
        job.deliver(reply)

    def _on_end(self, process: EngineProcess, error: ShoalError) -> None:
        """A process said why it cannot start, or is gone: find its jobs another home or tell them."""
        with self._lock:
            process.problem = process.problem or error
            if not process.gone.is_set():
                return
            process.model_info = None
            lost_jobs, process.jobs = list(process.jobs.values()), {}
            self._retiring = [each for each in self._retiring if each is not process]
            lost = [job for job in lost_jobs if job.heard or job.attempts >= self.config.attempts or self._closing]
            for job in lost_jobs:
                if job not in lost:
                    self._place(job)
            self._changed.notify_all()
        for job in lost:
            job.deliver(Failed(EngineStopped("the engine failed while it spoke; send the request again")))

    def _start_engine(self, source: EngineSource, *, if_none_lives: bool = False) -> None:
        """Start an engine and make it the current one when it is ready. The one before speaks what it has to its end.

        With `if_none_lives` the fresh one goes again if another has been started meanwhile. Raises what kept it from
        starting, and EngineStopped when we are closed meanwhile.
        """
        fresh = EngineProcess(source, self._on_reply)
        with self._lock:
            self._starting.append(fresh)
            if self._closing:
                fresh.kill()
        try:
            self._await_ready(fresh)
        finally:
            with self._lock:
                self._starting.remove(fresh)
        with self._lock:
            if self._closing:
                fresh.kill()
                raise EngineStopped("the engine was closed")
            if if_none_lives and self._lives():
                self._retire(fresh)
                return
            old, self._current, self.source, self._failures = self._current, fresh, source, 0
            if old is not None and old.lives:
                self._retire(old)
            waiting, self._queued = self._queued, []
            for job in waiting:
                self._place(job)

    def _lives(self) -> bool:
        return self._current is not None and self._current.lives

    def _retire(self, process: EngineProcess) -> None:
        """Let it speak what it has, and end. Under the lock."""
        self._retiring.append(process)
        process.send(0, Close(drain=True, timeout=None))

    def _await_ready(self, process: EngineProcess) -> None:
        deadline = time.monotonic() + self.config.start_seconds
        with self._changed:
            while process.model_info is None and not process.gone.is_set() and time.monotonic() < deadline:
                self._changed.wait(0.5)
        if process.model_info is None:
            process.kill()
            raise process.problem or EngineStopped(f"the engine was not ready in {self.config.start_seconds:g} s")

    def _monitor(self) -> None:
        """Restart an engine that died, and end one that hangs, for as long as this supervisor lives."""
        while not self._closing:
            current = self._current
            if current is None or current.gone.wait(0.1):
                self._restart()
            elif current.jobs and time.monotonic() - current.progress > self.config.hang_seconds:
                logger.error("the engine has not stepped for %.0f s; ending it", self.config.hang_seconds)
                current.kill()
                current.gone.wait()

    def _restart(self) -> None:
        if self._closing:
            return
        self.restarts += 1
        logger.warning("the engine process is gone; starting it again (%d)", self.restarts)
        try:
            self._start_engine(self.source, if_none_lives=True)
        except ShoalError as error:
            if self._closing or self._lives():
                return
            self._failures += 1
            logger.error("the engine does not start: %s", error)
            # Why is for whoever reads the log: it tells of files that are nobody else's business.
            self._fail_all(EngineStopped("the engine does not start at the moment; try again later"))
            time.sleep(min(0.1 * 2**self._failures, self.config.longest_pause))

    def _fail_all(self, error: ShoalError) -> None:
        with self._lock:
            jobs, self._queued = self._queued, []
            for process in (self._current, *self._retiring):
                if process is not None:
                    jobs, process.jobs = [*jobs, *process.jobs.values()], {}
        for job in jobs:
            job.deliver(Failed(error))


def _from_thread(replies: "asyncio.Queue[Spoken | Answer | Failed]") -> Deliver:
    """Puts replies into a queue of the event loop that runs now."""
    loop = asyncio.get_running_loop()

    def deliver(reply: Spoken | Answer | Failed) -> None:
        with suppress(RuntimeError):  # the event loop is gone: nobody listens
            loop.call_soon_threadsafe(replies.put_nowait, reply)

    return deliver


def _value(reply: Spoken | Answer | Failed) -> Any:
    if isinstance(reply, Failed):
        raise reply.error
    assert isinstance(reply, Answer), "questions get answers"
    return reply.value


def _chunk(reply: Spoken | Answer | Failed) -> AudioChunk:
    if isinstance(reply, Failed):
        raise reply.error
    assert isinstance(reply, Spoken), "speech comes in chunks"
    return reply.chunk
