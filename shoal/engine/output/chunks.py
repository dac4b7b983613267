"""Chunk sizing. Pure functions, so that the simulator cuts audio as the engine does."""

# Frames of every chunk but those of a player that is about to catch up, and of the first chunk of a fast engine.
LEAST_FRAMES = 2
# Share of a frame's audio that a step of all slots may take where the first chunk has one frame. The next frame must
# arrive while that one is played, also when it waits for the prompts of a burst (half of this time) beforehand.
FAST_STEP = 1 / 6


def first_chunk_frames(frame_rate: float, step_seconds: float) -> int:
    """Return the frames of the first chunk of an engine whose steps take `step_seconds` with a frame of every slot."""
    return 1 if step_seconds * frame_rate <= FAST_STEP else LEAST_FRAMES


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
    least = max(first, min(LEAST_FRAMES, max_frames))
    return least if lead <= 0 else max(least, min(sent // 2, max_frames))
