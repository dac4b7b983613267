import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.api.byte_buffer import Pipe
from shoal.api.exceptions import SlowReader
from shoal.api.output import Renderer, Rendering
from shoal.audio.tempo import Tempo, stages


def test_bytes_come_out_as_they_went_in() -> None:
    async def run() -> list[bytes]:
        pipe = Pipe(100, "end")

        async def make() -> None:
            for number in range(20):
                await pipe.put(bytes([number]))
                await asyncio.sleep(0)
            pipe.close()

        task = asyncio.create_task(make())
        await pipe.started()
        pieces = [piece async for piece in pipe.pieces()]
        await task
        return pieces

    assert asyncio.run(run()) == [bytes([number]) for number in range(20)]


def test_a_reader_too_far_behind_is_ended() -> None:
    async def run() -> None:
        pipe = Pipe(10, "end")
        await pipe.put(b"12345678")
        with pytest.raises(SlowReader):
            await pipe.put(b"12345678")

    asyncio.run(run())


def test_or_waited_for() -> None:
    async def run() -> list[bytes]:
        pipe = Pipe(10, "pause")

        async def make() -> None:
            for _ in range(5):
                await pipe.put(b"12345678")
            pipe.close()

        task = asyncio.create_task(make())
        await asyncio.sleep(0.01)
        assert not task.done()
        return [piece async for piece in pipe.pieces()]

    assert asyncio.run(run()) == [b"12345678"] * 5


def test_an_error_comes_after_what_was_made() -> None:
    async def run() -> None:
        pipe = Pipe(10, "end")
        await pipe.put(b"a")
        pipe.close(ValueError("broken"))
        await pipe.started()
        reading = pipe.pieces()
        assert await anext(reading) == b"a"
        with pytest.raises(ValueError, match="broken"):
            await anext(reading)

    asyncio.run(run())


@given(speed=st.floats(0.25, 4.0))
def test_stages_multiply_to_the_speed(speed: float) -> None:
    parts = stages(speed)
    assert np.prod(parts) == pytest.approx(speed)
    assert min(parts) >= 0.5


@pytest.mark.parametrize("speed", [0.25, 0.7, 1.5, 4.0])
def test_tempo_keeps_the_pitch_and_changes_the_time(speed: float) -> None:
    rate = 16_000
    tone = (0.5 * np.sin(2 * np.pi * 400 * np.arange(2 * rate) / rate)).astype(np.float32)
    tempo = Tempo(rate, speed)
    heard = np.concatenate([*(tempo.feed(tone[i : i + 640]) for i in range(0, len(tone), 640)), tempo.finish()])
    assert len(heard) == pytest.approx(len(tone) / speed, rel=0.05)
    middle = heard[len(heard) // 4 : -len(heard) // 4]
    peak = np.argmax(np.abs(np.fft.rfft(middle * np.hanning(len(middle))))) * rate / len(middle)
    assert peak == pytest.approx(400, abs=6)


def test_nothing_stretched_is_nothing() -> None:
    tempo = Tempo(16_000, 2.0)
    assert tempo.feed(np.zeros(0, np.float32)).size == 0
    assert tempo.finish().size == 0


def test_whole_bytes_come_at_the_end_with_their_length() -> None:
    renderer = Renderer(Rendering("wav"), 16_000, stream=False)
    assert renderer.feed(np.zeros(160, np.float32)) == b""
    assert len(renderer.finish()) == 44 + 320
