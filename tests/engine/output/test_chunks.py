import math

import pytest

from shoal.engine.output.chunks import chunk_frames, first_chunk_frames

FIRST, MOST = 2, 32


def cut(frames: int, lead: float, first: int = FIRST) -> list[int]:
    """Return the chunk sizes for that many frames at a constant lead over playback."""
    chunks: list[int] = []
    while (sent := sum(chunks)) < frames:
        chunks.append(min(chunk_frames(sent, lead, first, MOST), frames - sent))
    return chunks


def test_chunks_grow_with_the_frames_sent() -> None:
    chunks = cut(200, lead=50)
    assert chunks[:6] == [2, 2, 2, 3, 4, 6]
    assert max(chunks) == MOST
    assert sum(chunks) == 200


def test_a_client_about_to_underrun_gets_every_frame() -> None:
    assert cut(6, lead=0.5) == [2, 1, 1, 1, 1]


def test_a_client_after_an_underrun_gets_small_chunks() -> None:
    assert cut(8, lead=-3) == [2, 2, 2, 2]


def test_only_the_first_chunk_of_a_fast_engine_has_one_frame() -> None:
    assert cut(20, lead=50, first=1)[:6] == [1, 2, 2, 2, 3, 5]
    assert cut(9, lead=-3, first=1) == [1, 2, 2, 2, 2]


def test_a_request_for_longer_first_chunks_gets_none_shorter_later() -> None:
    assert cut(60, lead=50, first=10) == [10, 10, 10, 15, 15]
    assert cut(25, lead=-3, first=10) == [10, 10, 5]


@pytest.mark.parametrize(
    ("milliseconds", "frames"),
    [
        pytest.param(4.73, 1, id="S1-mini, 256 slots of an H200"),
        pytest.param(8.14, 2, id="S1-mini, 512 slots of an H200"),
        pytest.param(6.44, 1, id="S2-Pro, 64 slots of an H200"),
        pytest.param(15.0, 2, id="a slower card"),
        pytest.param(math.inf, 2, id="not measured"),
    ],
)
def test_the_first_chunk_has_one_frame_where_steps_are_fast(milliseconds: float, frames: int) -> None:
    assert first_chunk_frames(44_100 / 2_048, milliseconds / 1e3) == frames
