"""Recordings made on the spot: no binary files are kept."""

import io
import sys
from collections.abc import Callable
from functools import cache

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.audio.pcm import Samples
from shoal.audio.resample import StreamPool

Recorded = Callable[..., bytes]
# A Python whose warnings are errors, but for numpy's about CPU features that it does not know (pyproject.toml).
STRICT_PYTHON = [sys.executable, "-W", "error", "-W", "ignore:During parsing environment variable:ImportWarning"]


@pytest.fixture(scope="session")
def speech() -> Callable[..., Samples]:
    """speech(seconds, rate): a voiced sound with syllables, most of it below 4 kHz."""

    @cache
    def made(seconds: float, rate: int) -> Samples:
        time = np.arange(round(seconds * rate)) / rate
        pitch = 2 * np.pi * 120 * time + 3 * np.sin(2 * np.pi * 2.3 * time)
        voice = sum(np.sin(n * pitch) / n for n in range(1, 20))
        return (0.3 * voice * np.sin(2 * np.pi * 1.7 * time) ** 2).astype(np.float32)

    def make(seconds: float = 1.0, rate: int = 44_100) -> Samples:
        return made(seconds, rate).copy()

    return make


@pytest.fixture(scope="session")
def likeness() -> Callable[[Samples, Samples], float]:
    """The best correlation of two signals over all delays: 1 for the same sound."""

    def compare(a: Samples, b: Samples) -> float:
        length = len(a) + len(b)
        spectrum = np.fft.rfft(a, length) * np.conj(np.fft.rfft(b, length))
        return float(np.fft.irfft(spectrum).max() / np.linalg.norm(a) / np.linalg.norm(b))

    return compare


@pytest.fixture(scope="session")
def recorded() -> Recorded:
    """recorded(pcm [channels, n], rate, container, codec): a file as ffmpeg writes it."""

    def make(
        pcm: NDArray[np.generic], rate: int, container: str, codec: str, sample_format: str, layout: str = "mono"
    ) -> bytes:
        file = io.BytesIO()
        with av.open(file, "w", format=container) as output:
            # ffmpeg calls its own vorbis encoder experimental.
            stream = output.add_stream(codec, rate, options={"strict": "-2"})
            stream.codec_context.bit_rate = 128_000
            stream.codec_context.layout = layout
            stream.codec_context.format = sample_format
            for start in range(0, pcm.shape[1], rate):
                piece = np.ascontiguousarray(pcm[:, start : start + rate])
                planar = sample_format.endswith("p")
                frame = av.AudioFrame.from_ndarray(piece if planar else piece.T.reshape(1, -1), sample_format, layout)
                frame.sample_rate = rate
                frame.pts = start
                output.mux(stream.encode(frame))
            output.mux(stream.encode(None))
        return file.getvalue()

    return make


@pytest.fixture
def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the packages of `shoal-tts[formats]`."""
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setitem(sys.modules, "soxr", None)
    monkeypatch.setattr("shoal.audio.resample.STREAMS", StreamPool(1))
