"""Where speech is cut into chunks. Pure: the simulator cuts as the engine does."""


def chunk_frames(sent: int, lead: float, first: int, most: int) -> int:
    """Frames that make a chunk worth sending now, between `first` and `most`: half of those that have been sent.

    `lead` of those have not been heard yet. It decides only when playback would catch up: as long as frames come well
    faster than they are heard, chunks are cut at the same places every time, and with them the last bits of the samples
    repeat.
    """
    if sent and 0 < lead <= 1:
        return 1  # the next frame may come too late
    return first if not sent or lead <= 0 else max(first, min(sent // 2, most))
