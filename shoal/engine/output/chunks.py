"""Chunk sizing. Pure functions, so that the simulator cuts audio as the engine does."""

# Minimum frames of a chunk, but one frame is sent where playback is about to run out, and first where steps are fast.
MIN_CHUNK_FRAMES = 2
# A first chunk has one frame if a step of all slots takes at most this share of a frame's duration. The second frame
# must arrive while the first is played, also if a step of prompts, half of that duration, comes before it.
MAX_STEP_SHARE = 1 / 6


def first_chunk_frames(frame_rate: float, step_seconds: float) -> int:
    """Return the frames of the first chunk of an engine whose steps take `step_seconds` with a frame of every slot."""
    return 1 if step_seconds * frame_rate <= MAX_STEP_SHARE else MIN_CHUNK_FRAMES


def chunk_frames(sent: int, lead: float, first: int, max_frames: int) -> int:
    """Return the frames a chunk needs before it is sent: `first`, and later half of `sent`, at most `max_frames`.

    `lead` is the number of sent frames that have not been played yet. It matters only when playback is about to catch
    up: as long as generation is well ahead, chunks are cut at the same places every time, so the samples are
    bit-identical.
    """
    if not sent:
        return first
    if 0 < lead <= 1:
        return 1  # playback may run out before the next frame
    least = max(first, min(MIN_CHUNK_FRAMES, max_frames))
    return least if lead <= 0 else max(least, min(sent // 2, max_frames))
