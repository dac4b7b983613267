"""One engine process as the supervisor sees it: its pipe, its jobs and the times that show whether it hangs."""

import logging
import multiprocessing
import pickle
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from shoal.engine.process.messages import Command, Failed, Fragment, Heartbeat, JobReply, ModelInfo, Reply
from shoal.engine.process.worker import EngineSource, run_worker
from shoal.errors import EngineStopped, GenerationFailed, ShoalError

Deliver = Callable[[JobReply], None]


@dataclass(slots=True, eq=False)
class EngineJob:
    """A command of a caller, and the callback for its replies."""

    id: int
    command: Command
    deliver: Deliver
    attempts: int = 0
    replied: bool = False  # the caller has received a reply, so the job cannot be resubmitted
    context: Context = field(default_factory=copy_context)  # caller's context, for log records about this job


def final_error(
    job: EngineJob, blamed: frozenset[int] | None, attempts: int, max_attempts: int, *, closing: bool
) -> ShoalError | None:
    """Return the error that ends a job of a process that died, or None if it is to be replayed.

    `blamed` are the jobs suspected of the crash (None: not known); they get `attempts` processes, the others more.
    """
    if job.replied or closing:
        return EngineStopped("the engine failed while processing the request; send it again")
    if blamed is not None and job.id not in blamed:
        busy = job.attempts >= max_attempts
        return EngineStopped("the engine failed several times; try again later") if busy else None
    if job.attempts >= attempts:
        # Not EngineStopped, which tells clients to retry: the next engine process would die as well.
        return GenerationFailed(f"the engine failed {job.attempts} times while processing this request")
    return None


class EngineProcess:
    """One engine process with its pipe, its jobs, and one thread each for sending and receiving."""

    def __init__(self, source: EngineSource, on_reply: Callable[["EngineProcess", int, Reply], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        level = logging.getLogger("shoal").getEffectiveLevel()
        self.process = context.Process(
            target=run_worker, args=(child_end, source, level), name="shoal-engine", daemon=True
        )
        self.process.start()
        child_end.close()
        self.jobs: dict[int, EngineJob] = {}
        self._fragments: dict[int, list[bytes]] = {}  # parts of replies that have not arrived completely
        self.model_info: ModelInfo | None = None
        self.start_error: ShoalError | None = None
        self.blamed: frozenset[int] | None = None  # jobs suspected of crashing the process; None: not known
        self.steps = 0
        # Monotonic times of the last step or idle heartbeat, of the last message, and of the last moment with a job.
        self.progress = self.last_reply = self.busy = time.monotonic()
        self._commands: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()
        self._on_reply = on_reply
        self.exited = threading.Event()
        threading.Thread(target=self._receive_replies, name="shoal-receive", daemon=True).start()
        threading.Thread(target=self._send_commands, name="shoal-send", daemon=True).start()

    @property
    def alive(self) -> bool:
        return not self.exited.is_set()

    def send(self, job: int, command: Command) -> None:
        """Queue a command without blocking, so that event loops may call it. Ignored by a dead process."""
        self._commands.put((job, command))

    def kill(self) -> None:
        self.process.kill()

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the process to exit; return whether it has."""
        self.process.join(timeout)
        return self.process.exitcode is not None

    def record_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Count a heartbeat as progress if a step has run since the last one, or the engine is idle."""
        if heartbeat.active == 0 or heartbeat.steps != self.steps:
            self.progress = time.monotonic()
        self.steps = heartbeat.steps

    def _receive_replies(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                replies = self._pipe.recv()
                self.last_reply = time.monotonic()
                for job, reply in replies:
                    whole = self._joined(job, reply)
                    if whole is not None:
                        self._on_reply(self, job, whole)
        self.process.join()
        self.exited.set()
        self._commands.put(None)
        self._on_reply(self, 0, Failed(EngineStopped(f"the engine process exited with code {self.process.exitcode}")))

    def _joined(self, job: int, reply: Reply | Fragment) -> Reply | None:
        """Return a reply, or None after a fragment that is not the last of its reply."""
        if not isinstance(reply, Fragment):
            return reply
        self._fragments.setdefault(job, []).append(reply.data)
        if not reply.last:
            return None
        whole: Reply = pickle.loads(b"".join(self._fragments.pop(job)))  # as safe as `recv`: from our own process
        return whole

    def _send_commands(self) -> None:
        with suppress(OSError):
            while (message := self._commands.get()) is not None:
                self._pipe.send(message)
