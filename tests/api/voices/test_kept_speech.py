import io

import numpy as np
import pytest

from shoal.api.exceptions import SpeechNotKept
from shoal.api.voices.kept_speech import KeptSpeechStore
from shoal.audio.decode import AudioLimits, read_audio
from shoal.speech import AudioChunk

RATE = 16_000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def chunk(seconds: float = 1.0) -> AudioChunk:
    return AudioChunk(np.full(round(seconds * RATE), 0.25, np.float32), RATE)


def keep(store: KeptSpeechStore, id: str, seconds: float = 1.0, key: str = "alice", text: str = "Hello.") -> None:
    recorder = store.record(key, id, text)
    recorder.add(chunk(seconds))
    recorder.finish()


def is_kept(store: KeptSpeechStore, id: str, key: str = "alice") -> bool:
    try:
        store.find(key, id)
    except SpeechNotKept:
        return False
    return True


def test_finished_speech_is_found_by_its_key_and_id_only() -> None:
    store = KeptSpeechStore(1 << 20, 60, 10)
    recorder = store.record("alice", "one", "Hello there.")
    recorder.add(chunk(0.5))
    assert not is_kept(store, "one")
    recorder.add(chunk(0.25))
    recorder.finish()
    kept = store.find("alice", "one")
    assert kept.text == "Hello there."
    assert read_audio(io.BytesIO(kept.wav()), RATE, AudioLimits()).seconds == 0.75
    assert not is_kept(store, "one", key="bob")
    with pytest.raises(SpeechNotKept, match=r"no speech is kept for request 'two'.* up to 10 seconds.* for 60 seconds"):
        store.find("alice", "two")


def test_speech_expires() -> None:
    clock = Clock()
    store = KeptSpeechStore(1 << 20, 60, 10, clock)
    keep(store, "one")
    clock.now = 59.9
    assert is_kept(store, "one")
    clock.now = 60.0
    assert not is_kept(store, "one")


def test_the_oldest_speech_makes_room() -> None:
    store = KeptSpeechStore(3 * 2 * RATE, 60, 10)  # three seconds of 16-bit samples
    for id in ("one", "two", "three", "four"):
        keep(store, id)
    assert [is_kept(store, id) for id in ("one", "two", "three", "four")] == [False, True, True, True]
    keep(store, "long", seconds=3.0)
    assert [is_kept(store, id) for id in ("two", "three", "four", "long")] == [False, False, False, True]


def test_requests_in_flight_count_and_release_what_they_hold() -> None:
    store = KeptSpeechStore(2 * 2 * RATE, 60, 10)
    running = store.record("alice", "running", "Hello.")
    running.add(chunk(2.0))
    keep(store, "one")  # no room
    assert not is_kept(store, "one")
    running.discard()
    running.discard()
    running.finish()
    keep(store, "two")
    keep(store, "two")
    keep(store, "three")
    assert [is_kept(store, id) for id in ("running", "two", "three")] == [False, True, True]


def test_long_speech_and_long_texts_are_not_kept() -> None:
    store = KeptSpeechStore(1 << 20, 60, max_seconds=1.5)
    keep(store, "long", seconds=1.6)
    keep(store, "text", text="x" * 4_001)
    keep(KeptSpeechStore(0, 60, 10), "off")
    recorder = store.record("alice", "empty", "Hello.")
    recorder.finish()
    assert not any(is_kept(store, id) for id in ("long", "text", "empty"))
    keep(store, "short")
    assert is_kept(store, "short")
