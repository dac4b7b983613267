"""The engine process: loads a model, takes orders from a pipe, sends back chunks.

It ends when the pipe does, so it never outlives whoever started it.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from shoal.config import EngineConfig
from shoal.engine.process.jobs import JobRunner
from shoal.engine.process.logging import current_job, forward_logs
from shoal.engine.process.messages import (
    Answer,
    Cancel,
    Close,
    Decode,
    Encode,
    Failed,
    GetStats,
    Heartbeat,
    Order,
    Ready,
    Reply,
    Speak,
    Spoken,
)
from shoal.engine.utterance import Event
from shoal.errors import EngineStopped, ShoalError
from shoal.speech import SpeechRequest

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
DONE, BROKEN = 0, 70  # exit codes; the other is for a fault of the software
PREPARING_THREADS = 8  # that hash recordings, write turns and send answers; what encodes has its own


@dataclass(frozen=True)
class EngineSource:
    """Everything an engine is made from; it can be sent to another process."""

    model: str = "nano"
    device: str = "auto"
    dtype: str | None = None
    codec: Path | None = None
    voices: Path | None = None
    config: EngineConfig = field(default_factory=EngineConfig)


def run_worker(pipe: Connection, source: EngineSource, log_level: int) -> None:
    """The whole life of the process."""
    # Ctrl-C goes to the whole terminal group, and a service manager's SIGTERM to every process of the service: the
    # supervisor decides when this one ends, after what it speaks is spoken.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    outbox = ReplyChannel(pipe)
    forward_logs(outbox.send, log_level)
    try:
        worker = Worker(pipe, outbox, source)
    except ShoalError as error:
        outbox.send(0, Failed(error))
        return
    except Exception:
        logger.exception("the engine could not be loaded")
        end_process(BROKEN)
    worker.run()
    end_process(DONE)


def end_process(code: int) -> NoReturn:
    """At once: Python would wait for threads that encode what nobody wants any more.

    With `BROKEN` the supervisor starts another, and gives it the requests that nobody has heard anything of.
    """
    logging.shutdown()
    os._exit(code)


class ReplyChannel:
    """The way out of this process, for all its threads."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._sending = pipe, threading.Lock()

    def send(self, job: int, reply: Reply) -> None:
        # Without anybody at the other end the reading side notices, and ends the process.
        with suppress(OSError), self._sending:
            self._pipe.send((job, reply))


class Worker:
    def __init__(self, pipe: Connection, outbox: ReplyChannel, source: EngineSource) -> None:
        from shoal.engine.load import load_service

        self._pipe, self._send = pipe, outbox.send
        self._service = load_service(source)
        self._service.thread.on_failure = partial(end_process, BROKEN)
        # Whoever reads orders never sends: the other side may be waiting for its order to be read before it reads on.
        self._jobs = JobRunner(PREPARING_THREADS)

    def run(self) -> None:
        """Serve the pipe until it closes or says so."""
        self._send(0, Ready(self._service.model_info()))
        threading.Thread(target=self._beat, name="shoal-beat", daemon=True).start()
        with suppress(EOFError, OSError):
            while True:
                job, order = self._pipe.recv()
                if isinstance(order, Close):
                    self._go_down(order)
                    return
                self._take(job, order)

    def _go_down(self, order: Close) -> None:
        """End what has been taken, the way that was asked for; who leaves meanwhile is still let go."""
        closing = threading.Thread(target=self._close, args=(order,), name="shoal-close", daemon=True)
        closing.start()
        while closing.is_alive():
            if self._pipe.poll(0.02):
                job, late = self._pipe.recv()
                if isinstance(late, Cancel):
                    self._jobs.cancel(job)

    def _close(self, order: Close) -> None:
        if order.drain:
            self._jobs.wait(order.timeout)
        for job in self._jobs.cancel_all():
            self._send(job, Failed(EngineStopped("the engine was closed")))
        self._service.thread.close()

    def _take(self, job: int, order: Order) -> None:
        service = self._service
        if isinstance(order, Cancel):
            self._jobs.cancel(job)
        elif isinstance(order, Speak):
            self._jobs.begin(job, lambda: self._speak(job, order.request))
        elif isinstance(order, Encode):
            self._jobs.begin(job, lambda: self._answer(job, lambda: service.aencode(order.audio)))
        elif isinstance(order, Decode):
            self._jobs.begin(job, lambda: self._answer(job, lambda: service.adecode(order.codes)))
        elif isinstance(order, GetStats):
            self._jobs.begin(job, lambda: self._answer(job, lambda: asyncio.to_thread(service.statistics)))

    async def _speak(self, job: int, request: SpeechRequest) -> None:
        with self._answering(job):
            utterance = await self._service.prepare(request)
            del request  # its recordings may be long, and speaking takes a while
            utterance.id = job  # by which the log knows whom a line is about
            ended = asyncio.get_running_loop().create_future()
            self._service.thread.submit(utterance, partial(self._pass_on, job, ended))
            try:
                await ended
            except asyncio.CancelledError:
                self._service.thread.cancel(utterance)
                raise

    def _pass_on(self, job: int, ended: "asyncio.Future[None]", event: Event) -> None:
        """On the engine's thread, which sends chunks itself: they are not to wait for another one."""
        if event.error is not None:
            self._send(job, Failed(event.error))
        elif event.chunk is not None:
            self._send(job, Spoken(event.chunk))
        if event.last:
            ended.get_loop().call_soon_threadsafe(_settle, ended)

    async def _answer(self, job: int, ask: Callable[[], Awaitable[object]]) -> None:
        with self._answering(job):
            value = await ask()
            await asyncio.to_thread(self._send, job, Answer(value))

    @contextmanager
    def _answering(self, job: int) -> Iterator[None]:
        """The edge of this process: whatever goes wrong with a job, its caller hears of it."""
        current_job.set(job)
        try:
            yield
        except ShoalError as error:
            self._send(job, Failed(error))
        except Exception as problem:
            logger.exception("job %d failed", job)
            self._send(job, Failed(EngineStopped(f"internal error: {problem}")))

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            self._send(0, Heartbeat(self._service.core.stats.steps, self._service.thread.active))


def _settle(ended: "asyncio.Future[None]") -> None:
    if not ended.done():  # cancelled meanwhile
        ended.set_result(None)
