"""Generated recordings, and an encoder that needs no codec."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.audio.pcm import Samples, to_int16
from shoal.audio.wav import wav_header
from shoal.text.prompt import Codes
from shoal.voices.store import VoiceStore

RATE = 16_000


class LoudnessEncoder:
    """Encoder whose codes [2, frames] are the loudness of each tenth of a second. Counts calls; can block or fail."""

    sample_rate = RATE
    frame_rate = 10.0

    def __init__(self, fingerprint: str = "loudness") -> None:
        self.fingerprint = fingerprint
        self.encoded = 0
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def encode(self, samples: Samples) -> Codes:
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(240)
        if self.error is not None:
            raise self.error
        self.encoded += 1
        padded = np.pad(samples, (0, -len(samples) % 1600)).reshape(-1, 1600)
        return (np.stack([np.abs(padded).max(1), np.abs(padded).mean(1)]) * 1000).astype(np.int32)


@pytest.fixture
def encoder() -> Iterator[LoudnessEncoder]:
    made = LoudnessEncoder()
    yield made
    made.gate.set()  # a test that failed must not leave a thread behind


@pytest.fixture
def another_encoder() -> LoudnessEncoder:
    """Return an encoder with other codebooks: the same codes stand for other audio."""
    return LoudnessEncoder("another")


@pytest.fixture(scope="session")
def wav() -> Callable[..., bytes]:
    """Return wav(seconds, pitch, rate): a tone with syllables."""

    def make(seconds: float = 1.0, pitch: float = 220.0, rate: int = RATE) -> bytes:
        time = np.arange(round(seconds * rate)) / rate
        tone = 0.5 * np.sin(2 * np.pi * pitch * time) * np.sin(2 * np.pi * 1.7 * time) ** 2
        pcm = to_int16(tone.astype(np.float32)).tobytes()
        return wav_header(rate, len(pcm)) + pcm

    return make


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "voices").mkdir()
    return tmp_path / "voices"


@pytest.fixture
def store(directory: Path) -> VoiceStore:
    return VoiceStore(directory, sample_rate=RATE)
