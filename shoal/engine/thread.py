"""The engine on a thread of its own, and the iterators through which its chunks come out.

Orders go in through a queue, events come out through the caller's own queue; only the engine's thread touches the
engine. Leaving an iterator, for whatever reason, cancels the utterance at the next step.
"""

import asyncio
import atexit
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from shoal.engine.utterance import Event, Utterance
from shoal.errors import EngineBusy, EngineStopped, ShoalError
from shoal.speech import AudioChunk

if TYPE_CHECKING:
    from shoal.engine.core import EngineCore

logger = logging.getLogger(__name__)

Deliver = Callable[[Event], None]
Order = Callable[[], None]

# While requests wait for a batch to fill there is nothing to run, and nothing will wake us when their time is up.
NAP_SECONDS = 0.002


# A program may end, or fail, while somebody speaks: a thread that computes while Python is ending aborts the process.
OPEN: "WeakSet[EngineThread]" = WeakSet()


@atexit.register
def close_all() -> None:
    for loop in list(OPEN):
        loop.close()


class EngineThread:
    def __init__(self, engine: "EngineCore") -> None:
        self.engine = engine
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._sinks: dict[int, tuple[Utterance, Deliver]] = {}
        # Reentrant: chunks that nobody keeps are cancelled wherever garbage is collected, also within these sections.
        self._lock = threading.RLock()
        self._live: set[int] = set()  # ids of utterances that have been taken and have not ended
        self._leaving: set[int] = set()  # those of them that are cancelled, until the next step lets go of them
        self._stopping = False  # takes nothing new
        self._ended = False  # the engine is not touched any more
        self._failure: BaseException | None = None
        self.on_failure: Callable[[], None] | None = None  # called when the engine breaks, before anybody hears of it
        self._thread = threading.Thread(target=self._run, name="shoal-engine", daemon=True)
        self._thread.start()
        OPEN.add(self)

    @property
    def active(self) -> int:
        """Utterances that have been taken and have not ended."""
        return len(self._live)

    @property
    def running(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def speak(self, utterance: Utterance) -> Generator[AudioChunk, None, None]:
        """The chunks of an utterance as they come. Close the iterator to cancel."""
        chunks = self._chunks(utterance)
        # Begun at once, which submits: closing a generator that has not begun would run none of its code.
        next(chunks)
        return chunks

    async def aspeak(self, utterance: Utterance) -> AsyncGenerator[AudioChunk, None]:
        """The same for an event loop, which is never blocked."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            # The loop may be gone by the time the engine speaks; then nobody listens any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        self.submit(utterance, deliver)
        ended = False
        try:
            while not ended:
                event = await events.get()
                ended = event.last
                yield chunk_of(event)
        finally:
            if not ended:
                self.cancel(utterance)

    def submit(self, utterance: Utterance, deliver: Deliver) -> None:
        """Hand an utterance to the engine; `deliver` is called on the engine's thread and must not block."""
        config = self.engine.config
        with self._lock:
            if self._stopping or not self._thread.is_alive():
                raise EngineStopped("the engine is closed") from self._failure
            # Whoever leaves makes room at once, however long the step under way takes: orders are taken in turn, so
            # the engine has let go of the one before it hears of the next.
            wanted = len(self._live) - len(self._leaving)
            if wanted >= config.slots + config.max_waiting:
                raise EngineBusy(f"{wanted} requests are under way and the queue is full; try again later")
            self._live.add(utterance.id)
            # Under the lock: an order that is in before the end is answered, one that comes after is refused above.
            self._orders.put(lambda: self._add(utterance, deliver))

    def cancel(self, utterance: Utterance) -> None:
        """Free what an utterance holds, at the next step; unknown or ended ones are left alone."""
        with self._lock:
            if utterance.id in self._live:
                self._leaving.add(utterance.id)
            self._orders.put(lambda: self._cancel(utterance))

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Stop. With `drain`, what has been taken is spoken to its end first, for at most `timeout` seconds."""
        with self._lock:
            self._stopping = True
        self._orders.put(lambda: None)
        if drain:
            self._thread.join(timeout)
        self._orders.put(self._cancel_all)
        self._thread.join()

    def _chunks(self, utterance: Utterance) -> Generator[AudioChunk, None, None]:
        """An empty chunk once the utterance is submitted, then its own."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.submit(utterance, events.put)
        ended = False
        try:
            yield AudioChunk(np.zeros(0, np.float32), self.engine.checkpoint.codec.config.sample_rate)
            while not ended:
                event = events.get()
                ended = event.last
                yield chunk_of(event)
        finally:
            if not ended:
                self.cancel(utterance)

    def _run(self) -> None:
        try:
            # Not `idle`: what has been taken may still lie among the orders.
            while not (self._stopping and not self._live):
                self._take_orders()
                for event in self.engine.step():
                    self._tell(event)
        except BaseException as failure:  # the edge: whatever it is, every caller must hear of it
            logger.exception("the engine stopped")
            self._failure = failure
            if self.on_failure is not None:
                self.on_failure()
        finally:
            self._refuse_the_rest()

    def _take_orders(self) -> None:
        with suppress(queue.Empty):
            if self.engine.idle:
                self._orders.get()()
            elif not self.engine.scheduler.running:
                self._orders.get(timeout=NAP_SECONDS)()
            while True:
                self._orders.get_nowait()()

    def _add(self, utterance: Utterance, deliver: Deliver) -> None:
        self._sinks[utterance.id] = (utterance, deliver)
        try:
            if not self._ended:
                self.engine.add(utterance)
        except ShoalError as error:
            self._tell(Event(utterance, error=error))

    def _cancel(self, utterance: Utterance) -> None:
        if self._sinks.pop(utterance.id, None) is not None:
            self._forget(utterance)
            if not self._ended:
                self.engine.cancel(utterance)

    def _cancel_all(self) -> None:
        if self._ended:
            return
        for utterance, _ in list(self._sinks.values()):
            self._tell(self.engine.tracker.fail(utterance, EngineStopped("the engine was closed")))

    def _tell(self, event: Event) -> None:
        _, deliver = self._sinks[event.utterance.id]
        if event.last:
            del self._sinks[event.utterance.id]
            self._forget(event.utterance)
        try:
            deliver(event)
        except Exception:  # theirs, not ours: the other voices go on
            about = {"job": event.utterance.id}
            logger.exception("utterance %d: its listener failed and has left", event.utterance.id, extra=about)
            self._cancel(event.utterance)

    def _forget(self, utterance: Utterance) -> None:
        with self._lock:
            self._live.discard(utterance.id)
            self._leaving.discard(utterance.id)

    def _refuse_the_rest(self) -> None:
        """The thread ends: answer whoever still waits, without touching an engine that may be broken."""
        with self._lock:
            self._stopping = True
        self._ended = True
        with suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()
        for utterance, _ in list(self._sinks.values()):
            self._tell(Event(utterance, error=EngineStopped("the engine stopped")))


def chunk_of(event: Event) -> AudioChunk:
    """The chunk an event carries; raises the error it carries instead."""
    if event.error is not None:
        raise event.error
    assert event.chunk is not None, "an event has a chunk or an error"
    return event.chunk
