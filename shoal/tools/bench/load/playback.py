"""What a listener would have heard: whether audio that arrives in pieces runs out while it is played."""

from collections.abc import Sequence

# (seconds when a piece arrived, seconds of audio in it)
Arrivals = Sequence[tuple[float, float]]

BUFFERS = (0.05, 0.1, 0.2)


def stalled_seconds(arrivals: Arrivals, buffer: float) -> float:
    """Silence in the middle of a speech, for a player that begins `buffer` seconds after the first audio arrives.

    A player that has run dry goes on as soon as there is audio again.
    """
    if not arrivals:
        return 0.0
    stalled, runs_dry = 0.0, arrivals[0][0] + buffer
    for arrived, seconds in arrivals:
        stalled += max(0.0, arrived - runs_dry)
        runs_dry = max(runs_dry, arrived) + seconds
    return stalled
