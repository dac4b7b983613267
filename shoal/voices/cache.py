"""Voices in memory, by what was asked for.

A stored voice is remembered under its name and the stamp of its files, a recording that came with a request under the
hash of its bytes and its transcript. So nothing has to be told when a voice is renamed, deleted or made anew, by this
process or another: it is asked for under another key, and what is not asked for ages out.

Encoding runs in threads of the cache's own. Hashing and looking at files run in asyncio's, so that a voice in memory
never waits behind a recording that is being encoded.
"""

import asyncio
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeAlias

from shoal.audio.pcm import Samples
from shoal.errors import EngineStopped, ShoalError
from shoal.text.prompt import Codes
from shoal.voices.store import VoiceStore
from shoal.voices.voice import (
    DEFAULT_LIMITS,
    Clip,
    Voice,
    VoiceEncoder,
    VoiceLimits,
    audio_bytes,
    check_transcript,
    feed,
    voice_from_recordings,
)

logger = logging.getLogger(__name__)

VoiceSource: TypeAlias = str | Sequence[Clip]  # the name of a stored voice, or recordings


@dataclass(frozen=True, slots=True)
class VoiceCacheStats:
    """Counted since the start, but for `entries`."""

    entries: int = 0
    hits: int = 0
    joins: int = 0  # asked for while somebody else's encoding of it was under way
    misses: int = 0
    encodes: int = 0
    failures: int = 0
    evictions: int = 0
    seconds_encoded: float = 0.0


@dataclass(frozen=True, slots=True)
class VoiceLookup:
    """What was asked for: the key to remember it by, and how to make it."""

    key: Hashable
    make: Callable[[], Voice]


@dataclass(slots=True, eq=False)
class PendingVoice:
    """A voice in the making, and how many wait for it."""

    key: Hashable
    future: Future[Voice]
    waiting: int = 1


class VoiceCache:
    """The last `entries` voices that were used. A voice that cannot be made is forgotten and tried anew when asked for.

    Safe to use from any thread and any event loop. `with` closes it.
    """

    def __init__(
        self,
        store: VoiceStore,
        encoder: VoiceEncoder,
        *,
        entries: int = 1_000,
        threads: int = 1,
        limits: VoiceLimits = DEFAULT_LIMITS,
    ) -> None:
        self._store = store
        self._encoder = CountingEncoder(encoder, self._count_encode)
        self._most = entries
        self._limits = limits
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shoal-voices")
        self._lock = threading.Lock()
        # Under the lock: everything below. The voice used last stands last.
        self._voices: OrderedDict[Hashable, Voice] = OrderedDict()
        self._flights: dict[Hashable, PendingVoice] = {}
        self._warmings: list[VoicePreload] = []
        self._counts = VoiceCacheStats()
        self._closed = False

    async def resolve(self, wanted: VoiceSource) -> Voice:
        """The voice of that name, or of these recordings. Raises what `VoiceStore.get` or `voice_from_recordings` do.

        Leaving early is safe: others who wait for the same voice get it, and if nobody does, it is not encoded unless
        that has begun.
        """
        found = self._look_up(await asyncio.to_thread(self._order, wanted))
        if isinstance(found, Voice):
            return found
        try:
            return await _landed(found.future)
        finally:
            self._leave(found)

    def resolve_blocking(self, wanted: VoiceSource) -> Voice:
        """The same for threads that may wait."""
        found = self._look_up(self._order(wanted))
        if isinstance(found, Voice):
            return found
        try:
            return found.future.result()
        finally:
            self._leave(found)

    def warm(self, names: Sequence[str] | None = None) -> "VoicePreload":
        """Load stored voices, all of them if none are named, in the background, as many as there is room for.

        They come one at a time, so that requests overtake.
        """
        chosen = self._store.names() if names is None else names
        warming = VoicePreload(self, chosen[: self._most])
        with self._lock:
            self._check_open()
            self._warmings = [*(other for other in self._warmings if not other.finished), warming]
            warming.start()
        return warming

    @property
    def statistics(self) -> VoiceCacheStats:
        with self._lock:
            return replace(self._counts, entries=len(self._voices))

    def close(self) -> None:
        """Stop. Encoding that has begun is waited for; those who wait for the rest get an error."""
        with self._lock:
            self._closed = True
            warmings = self._warmings
        for warming in warmings:
            warming.stop()
        self._pool.shutdown()
        for warming in warmings:
            warming.wait()

    def __enter__(self) -> "VoiceCache":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _order(self, wanted: VoiceSource) -> VoiceLookup:
        if isinstance(wanted, str):
            name = wanted
            return VoiceLookup((name, self._store.stamp(name)), lambda: self._store.get(name, self._encoder))
        clips = [(audio_bytes(audio, self._limits), check_transcript(text, self._limits)) for audio, text in wanted]
        digest = hashlib.sha256()
        for audio, text in clips:
            feed(digest, audio, text.encode())
        return VoiceLookup(digest.digest(), lambda: voice_from_recordings(clips, self._encoder, self._limits))

    def _look_up(self, order: VoiceLookup) -> Voice | PendingVoice:
        with self._lock:
            self._check_open()
            if order.key in self._voices:
                self._count(hits=1)
                self._voices.move_to_end(order.key)
                return self._voices[order.key]
            flight = self._flights.get(order.key)
            if flight is None:
                self._count(misses=1)
                flight = PendingVoice(order.key, self._pool.submit(self._fly, order))
                self._flights[order.key] = flight
            else:
                self._count(joins=1)
                flight.waiting += 1
            return flight

    def _fly(self, order: VoiceLookup) -> Voice:
        """In a thread of the pool. The voice is in its place before the flight ends: nobody finds neither."""
        voice = None
        try:
            with self._lock:
                self._check_open()
            voice = order.make()
        finally:
            with self._lock:
                del self._flights[order.key]
                if voice is None:
                    self._count(failures=1)
                else:
                    self._remember(order.key, voice)
        return voice

    def _remember(self, key: Hashable, voice: Voice) -> None:
        self._voices[key] = voice
        while len(self._voices) > self._most:
            self._voices.popitem(last=False)
            self._count(evictions=1)

    def _leave(self, flight: PendingVoice) -> None:
        with self._lock:
            flight.waiting -= 1
            # True only for a flight that waits in the pool's queue and nobody wants any more.
            if flight.waiting == 0 and flight.future.cancel():
                del self._flights[flight.key]

    def _count_encode(self, seconds: float) -> None:
        with self._lock:
            self._count(encodes=1, seconds_encoded=seconds)

    def _count(self, **more: float) -> None:
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + by for name, by in more.items()})

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("the engine is closed")


class VoicePreload:
    """The loading of stored voices in the background. Those that fail are logged and counted."""

    def __init__(self, cache: VoiceCache, names: Sequence[str]) -> None:
        self.total = len(names)
        self.loaded = 0
        self.failed = 0
        self._cache = cache
        self._names = names
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-warm-voices", daemon=True)

    @property
    def finished(self) -> bool:
        """All are done, or it was stopped."""
        return not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No further voice is begun."""
        self._stopping.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it finished within that time."""
        self._thread.join(seconds)
        return self.finished

    def _run(self) -> None:
        for name in self._names:
            if self._stopping.is_set():
                return
            try:
                self._cache.resolve_blocking(name)
                self.loaded += 1
            except ShoalError as problem:
                if self._stopping.is_set():
                    return
                self.failed += 1
                logger.warning("voice %s was not loaded: %s", name, problem)
            except Exception:
                self.failed += 1
                logger.exception("voice %s was not loaded", name)


@dataclass(frozen=True, slots=True)
class CountingEncoder:
    """An encoder that tells how many seconds it has encoded."""

    encoder: VoiceEncoder
    count: Callable[[float], None]

    @property
    def sample_rate(self) -> int:
        return self.encoder.sample_rate

    @property
    def frame_rate(self) -> float:
        return self.encoder.frame_rate

    @property
    def fingerprint(self) -> str:
        return self.encoder.fingerprint

    def encode(self, samples: Samples) -> Codes:
        codes = self.encoder.encode(samples)
        self.count(len(samples) / self.sample_rate)
        return codes


async def _landed(flight: Future[Voice]) -> Voice:
    """Wait without owning: a waiter that is cancelled takes nothing from the others."""
    loop, landed = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[Voice]) -> None:
        # A closed loop: the waiter went with it.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(landed.set)

    flight.add_done_callback(wake)
    await landed.wait()
    return flight.result()
