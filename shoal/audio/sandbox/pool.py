"""Pool of decoder processes. They are started when needed, reused, and replaced when they die."""

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np

from shoal.audio.pcm import Samples
from shoal.audio.sandbox.messages import (
    MAX_ERROR_BYTES,
    MISSING_EXTRA,
    OK,
    READY,
    READY_UNFILTERED,
    DecodeRequest,
    DecodeResponse,
)
from shoal.errors import AudioError, EngineStopped, MissingExtra

logger = logging.getLogger(__name__)

MAX_PROCESSES = 2
MAX_JOBS = 200  # per process; bounds the effect of a memory leak in ffmpeg
START_SECONDS, JOB_SECONDS = 120.0, 120.0  # wall time; the worker's CPU time has a smaller limit
STOP_SECONDS = 2.0
# Environment variables passed on to the worker: no others, since they may be secrets.
VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TEMP", "TMPDIR")
COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from shoal.audio.sandbox.worker import main; main()"


class WorkerEnded(Exception):
    """The worker ended before it responded; `idle` if it exited by itself after its idle time."""

    def __init__(self, returncode: int, *, idle: bool) -> None:
        super().__init__(f"exit code {returncode}")
        self.returncode, self.idle = returncode, idle


@cache
def warn_unfiltered() -> None:
    """Log once that the seccomp filter is not available."""
    logger.warning("recordings are decoded without a system call filter: this kernel or machine does not support it")


class DecoderProcess:
    """One decoder process. Not thread-safe."""

    def __init__(self) -> None:
        """Start the process and wait until it is ready. Raises EngineStopped when it does not start."""
        self.jobs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", COMMAND, *(str(Path(path).absolute()) for path in sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in VARIABLES if name in os.environ} | {"OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C goes to the server only
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._responses = self._process.stdin, self._process.stdout
        with self._killed_after(START_SECONDS):
            answer = self._responses.read(len(READY))
        if answer == READY_UNFILTERED and sys.platform == "linux":
            warn_unfiltered()
        elif answer != READY and answer != READY_UNFILTERED:
            raise EngineStopped(f"the audio decoder process did not start (exit code {self.close()})")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def decode(self, data: bytes, request: DecodeRequest) -> tuple[DecodeResponse, bytearray]:
        """Return the response and its payload. Raises WorkerEnded."""
        self.jobs += 1
        try:
            with self._killed_after(JOB_SECONDS):
                self._send(request.pack(), data)
                return self._receive(request)
        except EOFError:
            returncode = self.close()
            raise WorkerEnded(returncode, idle=returncode == 0) from None

    def _send(self, *pieces: bytes) -> None:
        # A worker that has ended is noticed when its response is read.
        with suppress(BrokenPipeError):
            for piece in pieces:
                self._requests.write(piece)
            self._requests.flush()

    def _receive(self, request: DecodeRequest) -> tuple[DecodeResponse, bytearray]:
        response = DecodeResponse.read(self._responses)
        limit = 4 * request.max_samples() if response.status == OK else MAX_ERROR_BYTES
        if response.size > limit:
            raise EOFError  # not a response of our worker
        payload = bytearray(response.size)
        if self._responses.readinto(payload) < response.size:  # type: ignore[attr-defined]
            raise EOFError
        return response, payload

    @contextmanager
    def _killed_after(self, seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> int:
        """End the process, which stops when its input ends, and return its exit code. Idempotent."""
        with suppress(OSError):
            self._requests.close()
        try:
            returncode = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            returncode = self._process.wait()
        self._responses.close()
        return returncode


class DecoderPool:
    """Up to `max_processes` workers; a recording waits while all are busy. Thread-safe."""

    def __init__(self, max_processes: int = MAX_PROCESSES) -> None:
        self._free = threading.Semaphore(max_processes)
        self._lock = threading.Lock()
        self._idle: list[DecoderProcess] = []

    def decode(self, data: bytes, request: DecodeRequest) -> tuple[Samples, int, int]:
        """Return (samples, original rate, original channels). Raises AudioError, MissingExtra, EngineStopped."""
        with self._free:
            response, payload = self._run(data, request)
        if response.status == OK:
            return np.frombuffer(payload, np.float32), response.original_rate, response.original_channels
        message = payload.decode(errors="replace")
        raise MissingExtra(message) if response.status == MISSING_EXTRA else AudioError(message)

    def close(self) -> None:
        """End the idle processes. The pool can be used again."""
        with self._lock:
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.close()

    def forget(self) -> None:
        """Drop the processes without ending them: after a fork they belong to the parent."""
        self.__init__()  # type: ignore[misc]

    def _run(self, data: bytes, request: DecodeRequest) -> tuple[DecodeResponse, bytearray]:
        while True:
            worker = self._take()
            try:
                result = worker.decode(data, request)
            except WorkerEnded as end:
                if end.idle and worker.jobs > 1:
                    continue  # it ended itself just before the request arrived
                raise _failure(end) from None
            self._return_to_pool(worker)
            return result

    def _take(self) -> DecoderProcess:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                worker.close()
        return DecoderProcess()

    def _return_to_pool(self, worker: DecoderProcess) -> None:
        if worker.jobs >= MAX_JOBS:
            worker.close()
            return
        with self._lock:
            self._idle.append(worker)


def _failure(end: WorkerEnded) -> AudioError:
    logger.warning("audio decoder process ended while it decoded a recording (exit code %d)", end.returncode)
    if end.returncode in (-getattr(signal, "SIGXCPU", 0), -getattr(signal, "SIGKILL", 0)):
        return AudioError("decoding the recording takes too long; send it in another format, such as wav")
    return AudioError("the recording makes the decoder fail; send it in another format, such as wav")


def interpreter() -> str | None:
    """Return the path of the Python interpreter; None in a program that embeds Python without one."""
    path = sys.executable or ""
    return path if Path(path).name.lower().startswith(("python", "pypy")) else None


POOL = DecoderPool()
atexit.register(POOL.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=POOL.forget)
