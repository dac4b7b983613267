"""Chunk sizing. A pure function, so that the simulator cuts audio as the engine does."""


def chunk_frames(sent: int, lead: float, first: int, max_frames: int) -> int:
    """Return the frames a chunk needs before it is sent: half of `sent`, between `first` and `max_frames`.

    `lead` is the number of sent frames that have not been played yet. It matters only when playback is about to catch
    up: as long as generation is well ahead, chunks are cut at the same places every time, so the samples are
    bit-identical.
    """
    if sent and 0 < lead <= 1:
        return 1  # playback may run out before the next frame
    return first if not sent or lead <= 0 else max(first, min(sent // 2, max_frames))
