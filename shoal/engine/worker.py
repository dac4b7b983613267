"""The engine process: loads a model, takes orders from a pipe, sends back chunks.

It ends when the pipe does, so it never outlives whoever started it.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from shoal.config import EngineConfig
from shoal.engine.messages import (
    Answer,
    AskStatistics,
    Beat,
    Cancel,
    Close,
    Decode,
    Encode,
    Failed,
    Order,
    Ready,
    Reply,
    Speak,
    Spoken,
)
from shoal.engine.utterance import Event, Utterance
from shoal.errors import EngineStopped, ShoalError

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
BROKEN = 70  # exit code: a fault of the software
# Threads that resolve voices and write turns; most of their time they wait for one another's encoding.
PREPARING_THREADS = 8


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
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s engine %(name)s: %(message)s")
    try:
        worker = Worker(pipe, source)
    except ShoalError as error:
        pipe.send((0, Failed(error)))
        return
    worker.run()


def end_process() -> None:
    """The engine is broken, and this process was its life: the supervisor starts another, and gives it the requests
    that nobody has heard anything of."""
    logging.shutdown()
    os._exit(BROKEN)


class Worker:
    def __init__(self, pipe: Connection, source: EngineSource) -> None:
        from shoal.engine.load import load_service

        self._pipe = pipe
        self._sending = threading.Lock()
        self._service = load_service(source)
        self._service.loop.on_failure = end_process
        self._threads = ThreadPoolExecutor(PREPARING_THREADS, thread_name_prefix="shoal-prepare")
        # Whoever reads orders never sends: the other side may be waiting for its order to be read before it reads on.
        self._clerk = ThreadPoolExecutor(1, thread_name_prefix="shoal-statistics")
        self._utterances: dict[int, Utterance | None] = {}  # None while one is still being prepared
        self._table = threading.Lock()
        self._ended = threading.Event()

    def run(self) -> None:
        """Serve the pipe until it closes or says so."""
        self._send(0, Ready(self._service.facts()))
        beat = threading.Thread(target=self._beat, name="shoal-beat", daemon=True)
        beat.start()
        try:
            while True:
                job, order = self._pipe.recv()
                if isinstance(order, Close):
                    self._go_down(order)
                    return
                self._take(job, order)
        except (EOFError, OSError):
            self._service.close()
        finally:
            self._ended.set()
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._clerk.shutdown(wait=False, cancel_futures=True)
            # Otherwise it may be the last to hold the model, and a thread that lets go of tensors while Python is
            # ending aborts the process.
            beat.join(BEAT_SECONDS)

    def _go_down(self, order: Close) -> None:
        """End what has been taken, the way that was asked for; who leaves meanwhile is still let go."""
        closing = threading.Thread(target=self._close, args=(order,), name="shoal-close")
        closing.start()
        while closing.is_alive():
            if self._pipe.poll(0.02):
                job, late = self._pipe.recv()
                if isinstance(late, Cancel):
                    self._cancel(job)

    def _close(self, order: Close) -> None:
        if order.drain:
            self._threads.shutdown(wait=True)  # what is still being prepared was taken, too
        self._service.close(drain=order.drain, timeout=order.timeout)

    def _take(self, job: int, order: Order) -> None:
        if isinstance(order, Cancel):
            self._cancel(job)
            return
        if isinstance(order, Speak):
            self._utterances[job] = None
            self._threads.submit(self._answering, job, lambda: self._speak(job, order))
        elif isinstance(order, Encode):
            self._threads.submit(self._answering, job, lambda: self._answer(job, self._service.encode(order.audio)))
        elif isinstance(order, Decode):
            self._threads.submit(self._answering, job, lambda: self._answer(job, self._service.decode(order.codes)))
        elif isinstance(order, AskStatistics):
            self._clerk.submit(self._answering, job, lambda: self._answer(job, self._service.statistics()))

    def _answering(self, job: int, work: Callable[[], None]) -> None:
        """The edge of this process: whatever goes wrong with a job, its caller hears of it."""
        try:
            work()
        except ShoalError as error:
            self._fail(job, error)
        except Exception as problem:
            logger.exception("job %d failed", job)
            self._fail(job, EngineStopped(f"internal error: {problem}"))

    def _speak(self, job: int, order: Speak) -> None:
        service = self._service
        utterance = service.write(order.request, service.resolve_blocking(order.request))
        with self._table:
            if job not in self._utterances:
                return  # cancelled while it was prepared
            self._utterances[job] = utterance
            # Under the lock, since the loop ignores a cancel of what it does not have yet.
            service.loop.submit(utterance, lambda event: self._pass_on(job, event))

    def _pass_on(self, job: int, event: Event) -> None:
        if event.last:
            with self._table:
                self._utterances.pop(job, None)
        if event.error is not None:
            self._send(job, Failed(event.error))
        elif event.chunk is not None:
            self._send(job, Spoken(event.chunk))

    def _cancel(self, job: int) -> None:
        with self._table:
            utterance = self._utterances.pop(job, None)
        if utterance is not None:
            self._service.loop.cancel(utterance)

    def _answer(self, job: int, value: object) -> None:
        self._send(job, Answer(value))

    def _fail(self, job: int, error: ShoalError) -> None:
        with self._table:
            self._utterances.pop(job, None)
        self._send(job, Failed(error))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._send(0, Beat(self._service.core.stats.steps, self._service.loop.live))

    def _send(self, job: int, reply: Reply) -> None:
        try:
            with self._sending:
                self._pipe.send((job, reply))
        except OSError:
            # Nobody is at the other end; the reading side notices and ends the process.
            self._ended.set()
