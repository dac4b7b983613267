"""Main program of the engine process: loads a model, runs commands from a pipe and sends replies back.

The process exits when the pipe closes, so it never outlives its parent.
"""

import asyncio
import logging
import os
import pickle
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
    CancelJob,
    Close,
    Command,
    Decode,
    Dying,
    Encode,
    Failed,
    Fragment,
    GetStats,
    Heartbeat,
    Ready,
    ReleaseMemory,
    Reply,
    Result,
    Speak,
)
from shoal.engine.process.native_memory import HeapTrimmer, bound_heap
from shoal.engine.utterance import Event, Utterance
from shoal.errors import DeviceFailed, EngineStopped, InternalError, ShoalError
from shoal.gc_pause import paused_gc
from shoal.speech import AudioChunk

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
EXIT_DONE, EXIT_BROKEN = 0, 70  # 70 is EX_SOFTWARE
FRAGMENT_BYTES = 256 << 10  # 3 s of samples at 22 kHz; a pipe takes it in well under a millisecond
MAX_QUEUED_BYTES = 64 << 20  # audio that waits for a server process that does not read
FLUSH_SECONDS = 5.0  # maximum wait for the server to read the last replies before the process exits
PREPARE_THREADS = 8  # for hashing recordings, tokenizing long texts and sending results; encoding has its own thread


@dataclass(frozen=True)
class EngineSource:
    """Everything an engine is built from. Picklable, so that it can be sent to another process."""

    model: str = "nano"
    device: str = "auto"
    dtype: str | None = None
    codec: Path | None = None
    voices: Path | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    lexicon: Path | None = None


def run_worker(pipe: Connection, source: EngineSource, log_level: int) -> None:
    """Entry point of the process: load, serve the pipe, exit."""
    # Ctrl-C reaches the whole terminal group, and a service manager's SIGTERM every process of the service. The
    # supervisor decides when this process ends, after it has drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    bound_heap()
    replies = ReplyChannel(pipe)
    forward_logs(replies.send, log_level)
    try:
        worker = EngineWorker(pipe, replies, source)
    except ShoalError as error:
        replies.send(0, Failed(error))
        replies.flush(FLUSH_SECONDS)
        return
    except Exception:  # edge of the process: the supervisor sees only the exit code, so the cause is logged here
        logger.exception("loading the engine failed")
        exit_process(EXIT_BROKEN, replies)
    worker.run()
    exit_process(EXIT_DONE, replies)


def exit_process(code: int, replies: "ReplyChannel") -> NoReturn:
    """Send the queued replies and exit at once; a normal exit would wait for threads that still encode recordings.

    After `EXIT_BROKEN` the supervisor starts a new process and resubmits the requests that have sent no audio.
    """
    logging.shutdown()
    replies.flush(FLUSH_SECONDS)
    os._exit(code)


class ReplyChannel:
    """Sending side of the pipe: a queue that all threads of this process may fill, and a thread that empties it.

    A pipe holds less than a large chunk of audio. If the engine thread wrote to it, the next step would wait until the
    server process has read. Replies that have gathered meanwhile are sent as one message, a list of `(job, reply)`.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queued: list[tuple[int, Reply | Fragment]] = []
        self._size = 0  # bytes of audio in `_queued`
        self._writing = False
        self._changed = threading.Condition()
        threading.Thread(target=self._write, name="shoal-reply", daemon=True).start()

    def send(self, job: int, reply: Reply) -> None:
        """Queue a reply. Audio blocks while more than MAX_QUEUED_BYTES of it wait for the server to read."""
        with self._changed:
            if isinstance(reply, AudioChunk):
                self._changed.wait_for(lambda: self._size <= MAX_QUEUED_BYTES)
            self._append(job, reply)

    def send_large(self, job: int, reply: Reply) -> None:
        """Send a reply of any size in fragments, between which chunks of audio are sent first."""
        data = pickle.dumps(reply)
        for start in range(0, len(data), FRAGMENT_BYTES):
            end = start + FRAGMENT_BYTES
            with self._changed:
                self._changed.wait_for(lambda: not self._queued and not self._writing)
                self._append(job, Fragment(data[start:end], last=end >= len(data)))

    def flush(self, timeout: float) -> None:
        """Wait until everything has been sent, for at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queued and not self._writing, timeout)

    def _append(self, job: int, reply: Reply | Fragment) -> None:
        self._queued.append((job, reply))
        self._size += reply.samples.nbytes if isinstance(reply, AudioChunk) else 0
        self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queued)
                batch, self._queued, self._size, self._writing = self._queued, [], 0, True
                self._changed.notify_all()
            self._write_batch(batch)
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _write_batch(self, batch: list[tuple[int, Reply | Fragment]]) -> None:
        try:
            self._pipe.send(batch)
        except OSError:
            pass  # a closed pipe is handled by the reading side, which ends the process
        except (pickle.PicklingError, TypeError, AttributeError):  # one unpicklable reply must not lose the others
            if len(batch) > 1:
                for each in batch:
                    self._write_batch([each])
                return
            [(job, reply)] = batch
            logger.exception("a reply of type %s cannot be sent", type(reply).__name__, extra={"job": job})
            self._write_batch([(job, Failed(InternalError()))])


class EngineWorker:
    """Runs the commands of the pipe on a Service and queues the replies."""

    def __init__(self, pipe: Connection, replies: ReplyChannel, source: EngineSource) -> None:
        self._pipe, self._replies, self._send, self._send_large = pipe, replies, replies.send, replies.send_large
        # Excludes the objects of torch and the model from later garbage collections, which pause the engine thread.
        with paused_gc():
            from shoal.engine.load import load_service

            self._service = load_service(source)
        self._service.thread.on_failure = self._exit_broken
        # The thread that reads commands never sends: with both pipe buffers full, each side would wait for the other.
        self._jobs = JobRunner(PREPARE_THREADS)

    def run(self) -> None:
        """Run commands until the pipe closes or a Close command arrives."""
        self._send(0, Ready(self._service.model_info()))
        threading.Thread(target=self._send_heartbeats, name="shoal-heartbeat", daemon=True).start()
        with suppress(EOFError, OSError):
            while True:
                job, command = self._pipe.recv()
                if isinstance(command, Close):
                    self._shut_down(command)
                    return
                self._run_command(job, command)

    def _exit_broken(self, failure: BaseException) -> NoReturn:
        """Exit after the engine thread failed; tell the supervisor which requests may be the cause, if known."""
        if isinstance(failure, DeviceFailed):
            self._send(0, Dying(failure.blamed))
        exit_process(EXIT_BROKEN, self._replies)

    def _shut_down(self, command: Close) -> None:
        """Close in a thread, and keep handling CancelJob commands until it is done."""
        closing = threading.Thread(target=self._close, args=(command,), name="shoal-close", daemon=True)
        closing.start()
        while closing.is_alive():
            if self._pipe.poll(0.02):
                job, late = self._pipe.recv()
                if isinstance(late, CancelJob):
                    self._jobs.cancel(job)

    def _close(self, command: Close) -> None:
        if command.drain:
            self._jobs.wait(command.timeout)
        for job in self._jobs.cancel_all():
            self._send(job, Failed(EngineStopped("the engine was closed")))
        self._service.thread.close()

    def _run_command(self, job: int, command: Command) -> None:
        service = self._service
        if isinstance(command, CancelJob):
            self._jobs.cancel(job)
        elif isinstance(command, Speak):
            self._jobs.start(job, partial(self._speak, job, command))
        elif isinstance(command, Encode):
            self._jobs.start(job, lambda: self._reply(job, lambda: service.aencode(command.audio)))
        elif isinstance(command, Decode):
            self._jobs.start(job, lambda: self._reply(job, lambda: service.adecode(command.codes)))
        elif isinstance(command, GetStats):
            self._jobs.start(job, lambda: self._reply(job, lambda: asyncio.to_thread(service.statistics)))
        elif isinstance(command, ReleaseMemory):
            self._jobs.start(job, lambda: self._reply(job, lambda: asyncio.to_thread(service.release_memory)))

    async def _speak(self, job: int, command: Speak) -> None:
        with self._reporting_errors(job):
            utterance = await self._service.prepare(command.request, deadline=command.deadline, inline=True)
            utterance.id = job  # log records carry the utterance id as their job
            utterance.replayed = command.replayed
            del command  # frees the recordings of the request while the utterance runs
            ended = asyncio.get_running_loop().create_future()
            self._service.thread.submit(utterance, partial(self._send_event, job, ended))
            with self._cancelling(utterance):
                await ended

    @contextmanager
    def _cancelling(self, utterance: Utterance) -> Iterator[None]:
        """Cancel the utterance when the job is cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            self._service.thread.cancel(utterance)
            raise

    def _send_event(self, job: int, ended: "asyncio.Future[None]", event: Event) -> None:
        """Queue a chunk or an error; called by the engine thread."""
        if event.error is not None:
            self._send(job, Failed(event.error))
        elif event.chunk is not None:
            self._send(job, event.chunk)
        if event.last:
            ended.get_loop().call_soon_threadsafe(_settle, ended)

    async def _reply(self, job: int, ask: Callable[[], Awaitable[object]]) -> None:
        with self._reporting_errors(job):
            value = await ask()
            await asyncio.to_thread(self._send_large, job, Result(value))

    @contextmanager
    def _reporting_errors(self, job: int) -> Iterator[None]:
        """Send any error of a job to its caller, and attribute log records inside the block to the job."""
        token = current_job.set(job)
        try:
            yield
        except ShoalError as error:
            self._send(job, Failed(error))
        except Exception:  # edge of the process: the caller waits in another one
            logger.exception("job %d failed", job)
            if not self._service.device_responds():
                # The job is replayed by the next process. Its step did not fail, so no request is suspected.
                self._exit_broken(DeviceFailed("the device does not respond"))
            self._send(job, Failed(InternalError()))
        finally:
            current_job.reset(token)

    def _send_heartbeats(self) -> None:
        service, trimmer = self._service, HeapTrimmer()
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            heartbeat = Heartbeat(service.core.stats.steps, service.thread.active, service.backends)
            self._send(0, heartbeat)
            trimmer.update(heartbeat.steps, heartbeat.active)


def _settle(ended: "asyncio.Future[None]") -> None:
    if not ended.done():  # else the job was cancelled
        ended.set_result(None)
