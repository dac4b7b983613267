"""The engine thread, and the generators through which callers receive chunks.

Commands reach the thread through a queue, events leave through the caller's queue; only the engine thread touches the
core. Closing a generator cancels its utterance at the next step.
"""

import asyncio
import atexit
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

import numpy as np

from shoal.engine.utterance import Event, Utterance
from shoal.errors import EngineBusy, EngineStopped, ShoalError
from shoal.speech import AudioChunk

if TYPE_CHECKING:
    from shoal.engine.core import EngineCore

logger = logging.getLogger(__name__)

Deliver = Callable[[Event], None]
T = TypeVar("T")

# Poll interval while requests wait for a batch to fill: no command wakes the thread when their waiting time is up.
POLL_SECONDS = 0.002


# Closed at exit: a thread that still computes while the interpreter shuts down aborts the process.
OPEN_THREADS: "WeakSet[EngineThread]" = WeakSet()


@atexit.register
def close_all() -> None:
    for thread in list(OPEN_THREADS):
        thread.close()


class EngineThread:
    """Runs an EngineCore on a daemon thread. All public methods are thread-safe."""

    def __init__(self, core: "EngineCore") -> None:
        self.core = core
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sinks: dict[int, tuple[Utterance, Deliver]] = {}
        # Reentrant: garbage collection inside a locked section may close a generator, which calls `cancel`.
        self._lock = threading.RLock()
        self._active: set[int] = set()  # ids of utterances that are submitted and have not ended
        self._cancelled: set[int] = set()  # subset of `_active` that is released at the next step
        self._stopping = False  # accepts no new utterances
        self._ended = False  # the core is no longer used
        self._failure: BaseException | None = None
        # Called with the exception that ended the engine thread, before callers receive their errors.
        self.on_failure: Callable[[BaseException], None] | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-engine", daemon=True)
        self._thread.start()
        OPEN_THREADS.add(self)

    @property
    def active(self) -> int:
        """Utterances that are submitted and have not ended."""
        return len(self._active)

    @property
    def running(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def speak(self, utterance: Utterance) -> Generator[AudioChunk, None, None]:
        """Submit an utterance and return the generator of its chunks. Closing the generator cancels."""
        chunks = self._chunks(utterance)
        # Advance to the first yield, which submits: closing a generator that was never started runs no `finally`.
        next(chunks)
        return chunks

    async def aspeak(self, utterance: Utterance) -> AsyncGenerator[AudioChunk, None]:
        """Submit an utterance and yield its chunks without blocking the event loop. Closing cancels."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the event loop was closed, and the caller with it
                loop.call_soon_threadsafe(events.put_nowait, event)

        self.submit(utterance, deliver)
        ended = False
        try:
            while not ended:
                event = await events.get()
                ended = event.last
                yield event.chunk_or_raise()
        finally:
            if not ended:
                self.cancel(utterance)

    def submit(self, utterance: Utterance, deliver: Deliver) -> None:
        """Hand an utterance to the engine. `deliver` is called on the engine thread and must not block.

        Raises EngineStopped, or EngineBusy if `slots + max_waiting` utterances are active.
        """
        config = self.core.config
        with self._lock:
            if self._stopping or not self._thread.is_alive():
                raise EngineStopped("the engine is closed") from self._failure
            # A cancelled utterance stops counting immediately, however long the current step takes: commands run in
            # order, so the engine releases it before it adds this one.
            active = len(self._active) - len(self._cancelled)
            if active >= config.slots + config.max_waiting:
                raise EngineBusy(f"{active} requests are active and the queue is full; try again later")
            self._active.add(utterance.id)
            # Under the lock: a command queued before the thread ends is answered, a later one is refused above.
            self._commands.put(lambda: self._add(utterance, deliver))

    def cancel(self, utterance: Utterance) -> None:
        """Release an utterance at the next step; unknown and ended utterances are ignored."""
        with self._lock:
            if utterance.id in self._active:
                self._cancelled.add(utterance.id)
            self._commands.put(lambda: self._cancel(utterance))

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine thread between two steps and return its result, or raise its exception.

        Blocks, so it must not be called on the engine thread. Raises EngineStopped.
        """
        answer: Future[T] = Future()

        def run() -> None:
            if self._ended:
                answer.set_exception(EngineStopped("the engine stopped"))
                return
            try:
                answer.set_result(work())
            except Exception as error:  # noqa: BLE001 - edge of the thread: the caller waits on another one
                answer.set_exception(error)

        with self._lock:
            if self._stopping or not self._thread.is_alive():
                raise EngineStopped("the engine is closed") from self._failure
            self._commands.put(run)
        return answer.result()

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Stop the thread and wait for it. With `drain`, active utterances finish first, for at most `timeout` seconds.

        Utterances that are still active then fail with EngineStopped.
        """
        with self._lock:
            self._stopping = True
        self._commands.put(lambda: None)
        if drain:
            self._thread.join(timeout)
        self._commands.put(self._cancel_all)
        self._thread.join()

    def close_when_idle(self) -> None:
        """Accept no new utterances and end after the active ones. Does not block: garbage collection calls it."""
        self._stopping = True
        self._commands.put(lambda: None)

    def _chunks(self, utterance: Utterance) -> Generator[AudioChunk, None, None]:
        """Submit, yield one empty chunk, then yield the chunks of the utterance."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.submit(utterance, events.put)
        ended = False
        try:
            yield AudioChunk(np.zeros(0, np.float32), self.core.checkpoint.codec.config.sample_rate)
            while not ended:
                event = events.get()
                ended = event.last
                yield event.chunk_or_raise()
        finally:
            if not ended:
                self.cancel(utterance)

    def _run(self) -> None:
        try:
            self.core.use_device()
            # `_active` instead of `core.idle`: a submitted utterance may still be a queued command.
            while not (self._stopping and not self._active):
                self._run_commands()
                for event in self.core.step(self._dispatch):
                    self._dispatch(event)
        except BaseException as failure:  # edge of the engine thread: every caller has to receive an error
            logger.exception("engine thread failed")
            self._failure = failure
            if self.on_failure is not None:
                self.on_failure(failure)
        finally:
            self._fail_remaining()

    def _run_commands(self) -> None:
        with suppress(queue.Empty):
            if self.core.idle:
                self._commands.get()()
            elif not self.core.scheduler.running:
                self._commands.get(timeout=POLL_SECONDS)()
            while True:
                self._commands.get_nowait()()

    def _add(self, utterance: Utterance, deliver: Deliver) -> None:
        self._sinks[utterance.id] = (utterance, deliver)
        try:
            if not self._ended:
                self.core.add(utterance)
        except ShoalError as error:
            self._dispatch(Event(utterance, error=error))

    def _cancel(self, utterance: Utterance) -> None:
        if self._sinks.pop(utterance.id, None) is not None:
            self._forget(utterance)
            if not self._ended:
                self.core.cancel(utterance)

    def _cancel_all(self) -> None:
        if self._ended:
            return
        for utterance, _ in list(self._sinks.values()):
            self._dispatch(self.core.tracker.fail(utterance, EngineStopped("the engine was closed")))

    def _dispatch(self, event: Event) -> None:
        _, deliver = self._sinks[event.utterance.id]
        if event.last:
            del self._sinks[event.utterance.id]
            self._forget(event.utterance)
        try:
            deliver(event)
        except Exception:  # edge to the caller's code: a failing callback must not stop the other utterances
            extra = {"job": event.utterance.id}
            logger.exception("utterance %d: delivery callback failed; cancelling", event.utterance.id, extra=extra)
            self._cancel(event.utterance)

    def _forget(self, utterance: Utterance) -> None:
        with self._lock:
            self._active.discard(utterance.id)
            self._cancelled.discard(utterance.id)

    def _fail_remaining(self) -> None:
        """Answer all waiting callers with EngineStopped, without touching a core that may be broken."""
        with self._lock:
            self._stopping = True
        self._ended = True
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()
        for utterance, _ in list(self._sinks.values()):
            self._dispatch(Event(utterance, error=EngineStopped("the engine stopped")))
