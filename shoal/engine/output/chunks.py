"""Chunk sizing. Pure functions, so that the simulator cuts audio as the engine does."""

# Minimum frames of a chunk. One frame is enough if playback is about to underrun, and for a first chunk on a fast GPU.
MIN_CHUNK_FRAMES = 2
# A first chunk has one frame if a step of all slots takes at most this share of a frame's duration. The second frame
# must arrive while the first is played, even if a prefill-only step, which takes up to half a frame, runs before it.
MAX_STEP_SHARE = 1 / 6


def first_chunk_frames(frame_rate: float, step_seconds: float) -> int:
    """Return the frames of a first chunk; `step_seconds` is the time of a decode step with all slots in use."""
    return 1 if step_seconds * frame_rate <= MAX_STEP_SHARE else MIN_CHUNK_FRAMES


def chunk_frames(sent: int, lead: float, first: int, max_frames: int) -> int:
    """Return the frames a chunk needs before it is sent.

    The first chunk needs `first`, a later one half of the frames sent: at least `first`, at most `max_frames`. `lead`
    is the number of sent frames that have not been played yet. It matters only if playback is about to catch up: as
    long as generation is well ahead, chunks are cut at the same places every time. After a first chunk of one frame
    playback is always about to catch up, so one frame is the default only where samples do not depend on the cuts
    (`AudioDecoder.exact_chunks`).
    """
    if not sent:
        return first
    if 0 < lead <= 1:
        return 1  # playback may run out before the next frame
    minimum = max(first, min(MIN_CHUNK_FRAMES, max_frames))
    return minimum if lead <= 0 else max(minimum, min(sent // 2, max_frames))
