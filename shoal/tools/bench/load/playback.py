"""Playback of streamed audio: how long a player stalls because the next chunk is late."""

from collections.abc import Sequence

# (arrival time of a chunk, seconds of audio in it)
Arrivals = Sequence[tuple[float, float]]

BUFFERS = (0.05, 0.1, 0.2)


def stalled_seconds(arrivals: Arrivals, buffer: float) -> float:
    """Return the seconds of silence within an utterance, for a player that starts `buffer` seconds after the first
    audio and resumes as soon as more arrives.
    """
    if not arrivals:
        return 0.0
    stalled, runs_dry = 0.0, arrivals[0][0] + buffer
    for arrived, seconds in arrivals:
        stalled += max(0.0, arrived - runs_dry)
        runs_dry = max(runs_dry, arrived) + seconds
    return stalled
