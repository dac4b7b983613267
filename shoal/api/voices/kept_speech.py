"""Finished speech, kept in memory for a while so that a client can store it as a voice by its request id."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.api.exceptions import SpeechNotKept
from shoal.audio.encode import encode_file
from shoal.audio.pcm import to_float, to_int16
from shoal.speech import AudioChunk

MAX_TEXT = 4_000  # characters of a transcript


@dataclass(slots=True, eq=False)
class KeptSpeech:
    """Text and 16-bit samples of one request, for the key that sent it."""

    key: str
    text: str
    sample_rate: int = 0
    expires: float = 0.0  # on the store's clock
    pieces: list[NDArray[np.int16]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def wav(self) -> bytes:
        return encode_file(to_float(np.concatenate(self.pieces)), "wav", self.sample_rate)


class KeptSpeechStore:
    """Holds at most `max_bytes` of samples, requests in flight included; the oldest speech is dropped first.

    Speech longer than `max_seconds`, which is useless as a reference, is not kept. Not thread-safe.
    """

    def __init__(
        self, max_bytes: int, keep_seconds: float, max_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes, self._keep_seconds, self.max_seconds, self._clock = max_bytes, keep_seconds, max_seconds, clock
        self._used = 0
        self._finished: OrderedDict[tuple[str, str], KeptSpeech] = OrderedDict()

    def record(self, key: str, id: str, text: str) -> "SpeechRecorder":
        """Begin to record the speech of a request."""
        return SpeechRecorder(self, id, KeptSpeech(key, text), active=self._max_bytes > 0 and len(text) <= MAX_TEXT)

    def find(self, key: str, id: str) -> KeptSpeech:
        """Return the speech of a request of the same key. Raises SpeechNotKept."""
        self._drop_expired()
        if (key, id) not in self._finished:
            raise SpeechNotKept(
                f"no speech is kept for request {id[:64]!r}: speech of up to {self.max_seconds:g} seconds can be "
                f"stored as a voice for {self._keep_seconds:g} seconds after it was generated"
            )
        return self._finished[key, id]

    def reserve(self, size: int) -> bool:
        """Make room for `size` bytes; False if requests in flight hold too much."""
        self._drop_expired()
        while self._used + size > self._max_bytes and self._finished:
            self._release(self._finished.popitem(last=False)[1])
        if self._used + size > self._max_bytes:
            return False
        self._used += size
        return True

    def keep(self, id: str, speech: KeptSpeech) -> None:
        if previous := self._finished.pop((speech.key, id), None):
            self._release(previous)
        speech.expires = self._clock() + self._keep_seconds
        self._finished[speech.key, id] = speech

    def drop(self, speech: KeptSpeech) -> None:
        """Release the memory of speech that was recorded only in part."""
        self._release(speech)

    def _release(self, speech: KeptSpeech) -> None:
        self._used -= speech.size

    def _drop_expired(self) -> None:
        # In order of expiry, because all speech is kept for the same time.
        while self._finished and next(iter(self._finished.values())).expires <= self._clock():
            self._release(self._finished.popitem(last=False)[1])


class SpeechRecorder:
    """Records the chunks of one request until it is finished or discarded."""

    def __init__(self, store: KeptSpeechStore, id: str, speech: KeptSpeech, *, active: bool) -> None:
        self._store, self._id, self._speech, self._active = store, id, speech, active
        self._seconds = 0.0

    def add(self, chunk: AudioChunk) -> None:
        if not self._active or not len(chunk.samples):
            return
        samples = to_int16(chunk.samples)
        self._seconds += chunk.seconds
        if self._seconds > self._store.max_seconds or not self._store.reserve(samples.nbytes):
            self.discard()
            return
        self._speech.sample_rate = chunk.sample_rate
        self._speech.pieces.append(samples)

    def finish(self) -> None:
        """Keep the speech, now that it is complete."""
        if self._active and self._speech.pieces:
            self._active = False
            self._store.keep(self._id, self._speech)

    def discard(self) -> None:
        """Forget the speech unless it is finished. Idempotent."""
        if self._active:
            self._active = False
            self._store.drop(self._speech)
