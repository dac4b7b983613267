"""In-memory cache of encoded voices.

A stored voice is keyed by its name and the stamp of its files, recordings of a request by the hash of their bytes and
transcripts. So no invalidation is needed when this or another process renames, deletes or replaces a voice: the new
voice has another key, and the old entry ages out.

Encoding runs in the cache's own threads. Hashing and reading file stamps run in the caller's thread, so that a voice in
memory never queues behind a recording that is being encoded.
"""

import asyncio
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
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
    dialogue_voice,
    hash_parts,
    voice_from_recordings,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DialogueSource:
    """Voices of the speakers of a dialogue, in order: each the name of a stored voice, or recordings."""

    speakers: tuple[str | Sequence[Clip], ...]


VoiceSource: TypeAlias = str | Sequence[Clip] | DialogueSource  # the name of a stored voice, recordings, or a dialogue


@dataclass(frozen=True, slots=True)
class VoiceCacheStats:
    """Counters since the start; `entries` is the current number of cached voices."""

    entries: int = 0
    hits: int = 0
    joins: int = 0  # lookups that joined an encoding in flight
    misses: int = 0
    encodes: int = 0
    failures: int = 0
    evictions: int = 0
    seconds_encoded: float = 0.0


@dataclass(frozen=True, slots=True)
class VoiceLookup:
    """Cache key of a voice, and the function that makes the voice on a miss."""

    key: Hashable
    make: Callable[[], Voice]


@dataclass(slots=True, eq=False)
class PendingVoice:
    """A voice that is being made, and the number of callers that wait for it."""

    key: Hashable
    future: Future[Voice]
    waiting: int = 1


class VoiceCache:
    """LRU cache of at most `entries` voices. Failures are not cached. Thread-safe; `with` closes it."""

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
        self._max_entries = entries
        self._limits = limits
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shoal-voices")
        self._lock = threading.Lock()
        # Guarded by the lock: everything below.
        self._voices: OrderedDict[Hashable, Voice] = OrderedDict()  # least recently used first
        self._pending: dict[Hashable, PendingVoice] = {}
        self._preloads: list[VoicePreload] = []
        self._counts = VoiceCacheStats()
        self._closed = False

    async def resolve(self, source: VoiceSource) -> Voice:
        """Return the voice of that name, or of these recordings, without blocking the event loop.

        Raises what `VoiceStore.get` or `voice_from_recordings` raise. Cancelling is safe: other callers that wait for
        the same voice still get it; if there are none, the encoding is cancelled unless it has started.
        """
        return await self.load(await asyncio.to_thread(self.look_up, source))

    def resolve_blocking(self, source: VoiceSource) -> Voice:
        """`resolve` for threads that may block."""
        found = self._get_or_start(self.look_up(source))
        if isinstance(found, Voice):
            return found
        with self._waiting(found):
            return found.future.result()

    @property
    def local(self) -> bool:
        """True if all directories of voices are on local file systems."""
        return self._store.local

    def exists(self, name: str) -> bool:
        """Return whether a voice is stored, or built in, under this name. Blocks on file I/O."""
        return self._store.exists(name)

    def look_up(self, source: VoiceSource) -> VoiceLookup:
        """Return the key of a voice. Blocks: reads the stamps of a voice's files, or hashes recordings."""
        if isinstance(source, DialogueSource):
            speakers = [self.look_up(each) for each in source.speakers]
            return VoiceLookup(tuple(each.key for each in speakers), lambda: self._make_dialogue(speakers))
        if isinstance(source, str):
            name = source
            return VoiceLookup((name, self._store.stamp(name)), lambda: self._store.get(name, self._encoder))
        clips = [(audio_bytes(audio, self._limits), check_transcript(text, self._limits)) for audio, text in source]
        digest = hashlib.sha256()
        for audio, text in clips:
            hash_parts(digest, audio, text.encode())
        return VoiceLookup(digest.digest(), lambda: voice_from_recordings(clips, self._encoder, self._limits))

    def cached(self, lookup: VoiceLookup) -> Voice | None:
        """Return the voice if it is in memory; never encodes."""
        with self._lock:
            self._check_open()
            return self._hit(lookup.key)

    async def load(self, lookup: VoiceLookup) -> Voice:
        """Return the voice, after encoding it if it is not in memory."""
        found = self._get_or_start(lookup)
        if isinstance(found, Voice):
            return found
        with self._waiting(found):
            return await _result(found.future)

    def warm(self, names: Sequence[str] | None = None) -> "VoicePreload":
        """Load stored voices in the background, by default all, up to the capacity of the cache.

        They are loaded one at a time, so that voices of requests do not queue behind all of them.
        """
        chosen = self._store.names() if names is None else names
        preload = VoicePreload(self, chosen[: self._max_entries])
        with self._lock:
            self._check_open()
            self._preloads = [*(other for other in self._preloads if not other.finished), preload]
            preload.start()
        return preload

    @property
    def statistics(self) -> VoiceCacheStats:
        with self._lock:
            return replace(self._counts, entries=len(self._voices))

    def close(self) -> None:
        """Close the cache. Blocks until running encodings have finished; callers of queued ones get EngineStopped."""
        with self._lock:
            self._closed = True
            preloads = self._preloads
        for preload in preloads:
            preload.stop()
        self._pool.shutdown()
        for preload in preloads:
            preload.wait()

    def __enter__(self) -> "VoiceCache":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _get_or_start(self, lookup: VoiceLookup) -> Voice | PendingVoice:
        with self._lock:
            self._check_open()
            voice = self._hit(lookup.key)
            if voice is not None:
                return voice
            pending = self._pending.get(lookup.key)
            if pending is None:
                self._count(misses=1)
                pending = PendingVoice(lookup.key, self._pool.submit(self._make, lookup))
                self._pending[lookup.key] = pending
            else:
                self._count(joins=1)
                pending.waiting += 1
            return pending

    def _hit(self, key: Hashable) -> Voice | None:
        """Return a cached voice and mark it as used. The lock is held."""
        if key not in self._voices:
            return None
        self._count(hits=1)
        self._voices.move_to_end(key)
        return self._voices[key]

    def _make(self, lookup: VoiceLookup) -> Voice:
        """Make a voice in a pool thread; move it from `_pending` to the cache atomically, so no lookup misses it."""
        voice = None
        try:
            with self._lock:
                self._check_open()
            voice = lookup.make()
        finally:
            with self._lock:
                del self._pending[lookup.key]
                if voice is None:
                    self._count(failures=1)
                else:
                    self._insert(lookup.key, voice)
        return voice

    def _make_dialogue(self, speakers: Sequence[VoiceLookup]) -> Voice:
        """Join the voices of the speakers; those that are not in memory are made here, in this pool thread."""
        return dialogue_voice([self._make_speaker(each) for each in speakers])

    def _make_speaker(self, lookup: VoiceLookup) -> Voice:
        with self._lock:
            voice = self._hit(lookup.key)
        if voice is None:
            voice = lookup.make()
            with self._lock:
                self._insert(lookup.key, voice)
        return voice

    def _insert(self, key: Hashable, voice: Voice) -> None:
        self._voices[key] = voice
        while len(self._voices) > self._max_entries:
            self._voices.popitem(last=False)
            self._count(evictions=1)

    @contextmanager
    def _waiting(self, pending: PendingVoice) -> Iterator[None]:
        """Stop counting the caller on exit. If it was the last one, cancel an encoding that has not started."""
        try:
            yield
        finally:
            with self._lock:
                pending.waiting -= 1
                # `cancel` succeeds only while the call is queued in the pool.
                if pending.waiting == 0 and pending.future.cancel():
                    del self._pending[pending.key]

    def _count_encode(self, seconds: float) -> None:
        with self._lock:
            self._count(encodes=1, seconds_encoded=seconds)

    def _count(self, **more: float) -> None:
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + by for name, by in more.items()})

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("the engine is closed")


class VoicePreload:
    """Background loading of stored voices. Voices that fail are logged and counted."""

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
        """Return whether all voices are done, or the preload was stopped."""
        return not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop before the next voice."""
        self._stopping.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` and return whether it has finished."""
        self._thread.join(seconds)
        return self.finished

    def _run(self) -> None:
        for name in self._names:
            if self._stopping.is_set():
                return
            try:
                self._cache.resolve_blocking(name)
                self.loaded += 1
            except ShoalError as error:
                if self._stopping.is_set():
                    return
                self.failed += 1
                logger.warning("voice %s was not loaded: %s", name, error)
            except (OSError, RuntimeError):  # a failing disk or device: the next voice may still load
                self.failed += 1
                logger.exception("voice %s was not loaded", name)


@dataclass(frozen=True, slots=True)
class CountingEncoder:
    """VoiceEncoder that reports the seconds of audio it encodes."""

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


async def _result(future: Future[Voice]) -> Voice:
    """Await a future that several callers share: cancelling one caller does not cancel the future."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[Voice]) -> None:
        with suppress(RuntimeError):  # the event loop was closed, and the caller with it
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    await done.wait()
    return future.result()
