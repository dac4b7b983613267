from shoal.engine.output.chunks import chunk_frames

FIRST, MOST = 2, 32


def cut(frames: int, lead: float) -> list[int]:
    """Return the chunk sizes for that many frames at a constant lead over playback."""
    chunks: list[int] = []
    while (sent := sum(chunks)) < frames:
        chunks.append(min(chunk_frames(sent, lead, FIRST, MOST), frames - sent))
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
