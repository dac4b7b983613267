import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.api.output import OutputEncoder, OutputOptions
from shoal.api.state import ServerState
from shoal.audio.tempo import Tempo, tempo_factors


@given(speed=st.floats(0.25, 4.0))
def test_tempo_factors_multiply_to_the_speed(speed: float) -> None:
    factors = tempo_factors(speed)
    assert np.prod(factors) == pytest.approx(speed)
    assert min(factors) >= 0.5


@pytest.mark.parametrize("speed", [0.25, 0.7, 1.5, 4.0])
def test_tempo_changes_the_duration_and_not_the_pitch(speed: float) -> None:
    rate = 16_000
    tone = (0.5 * np.sin(2 * np.pi * 400 * np.arange(2 * rate) / rate)).astype(np.float32)
    tempo = Tempo(rate, speed)
    output = np.concatenate([*(tempo.feed(tone[i : i + 640]) for i in range(0, len(tone), 640)), tempo.finish()])
    assert len(output) == round(len(tone) / speed), "word times must not drift"
    middle = output[len(output) // 4 : -len(output) // 4]
    peak = np.argmax(np.abs(np.fft.rfft(middle * np.hanning(len(middle))))) * rate / len(middle)
    assert peak == pytest.approx(400, abs=6)


def test_tempo_of_no_samples_is_no_samples() -> None:
    tempo = Tempo(16_000, 2.0)
    assert tempo.feed(np.zeros(0, np.float32)).size == 0
    assert tempo.finish().size == 0


def test_without_streaming_the_whole_file_is_returned_at_the_end() -> None:
    encoder = OutputEncoder(OutputOptions("wav"), 16_000, stream=False)
    assert encoder.feed(np.zeros(160, np.float32)) == b""
    assert len(encoder.finish()) == 44 + 320


@pytest.mark.parametrize(("rate", "speed"), [(16_000, 1.0), (24_000, 1.0), (16_000, 0.5), (44_100, 1.3)])
def test_a_flushed_encoder_has_returned_everything_and_can_be_reused(rate: int, speed: float) -> None:
    pieces = np.array_split((0.5 * np.sin(np.arange(16_000) / 10)).astype(np.float32), 25)
    options = OutputOptions("pcm", rate, speed=speed)
    encoder, alone = (OutputEncoder(options, 16_000, stream=True) for _ in range(2))
    expected = b"".join([*map(alone.feed, pieces), alone.finish()])
    assert encoder.drain() == b""
    assert [b"".join([*map(encoder.feed, pieces), encoder.drain()]) for _ in range(2)] == [expected] * 2
    assert encoder.drain() == encoder.finish() == b""


@pytest.mark.parametrize(
    ("options", "stream", "thread"),
    [
        (OutputOptions("pcm", 24_000), True, False),
        (OutputOptions("wav"), True, False),
        (OutputOptions("wav", decibels=3.0), True, False),
        (OutputOptions("wav"), False, True),  # copies the whole file
        (OutputOptions("wav", speed=1.2), True, True),
        (OutputOptions("wav", normalize_loudness=True), True, True),
        (OutputOptions("mp3"), True, True),
    ],
)
def test_only_conversions_run_on_the_event_loop(options: OutputOptions, stream: bool, thread: bool) -> None:
    class Encoders(ThreadPoolExecutor):
        calls = 0

        def submit(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().submit(*args, **kwargs)

    with Encoders(1) as pool:
        state = object.__new__(ServerState)
        state.encoder_pool = pool
        encoder = OutputEncoder(options, 16_000, stream=stream)
        asyncio.run(state.encode(encoder, encoder.feed, np.zeros(3200, np.float32)))
        assert pool.calls == thread
