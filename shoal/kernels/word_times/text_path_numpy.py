"""Monotonic path through the text of a turn, one token per frame: a Viterbi search, extended frame by frame.

There are three implementations: NumPy (here, without torch), PyTorch operators and the GPU kernel (`text_path`). Scores
are integers, in steps of 1/1024 nat: sums are exact, and all three choose the same of equal paths. Only the logarithms
of the weights are floats, which may be rounded to neighbouring steps: paths differ only where scores are that close.
"""

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 2048  # maximum tokens of a text, about two minutes of speech; bounds the work per frame
INDEX_BITS = 11
SCALE = 1024.0  # steps per nat
# Penalty (0.4 nats) of each token that the path leaves out: rapid speech passes more than one token per frame.
SKIP_PENALTY = 410
# Added to the weights, so that no token is impossible: a frame that attends elsewhere must not break the path.
FLOOR = 1e-4
# Frames whose scores are kept: a frame that is generated again, after a preemption or by another backend, starts from
# the scores of the frame before it. The device is at most two frames ahead of the host.
KEPT_FRAMES = 4

Origins = NDArray[np.int16]  # [..., 1 + tokens]: the token in which the best path ends; the token before each token


def new_scores(slots: int) -> NDArray[np.int32]:
    """Return the scores [slots, KEPT_FRAMES, MAX_TOKENS] of the best paths that end in each token."""
    return np.zeros((slots, KEPT_FRAMES, MAX_TOKENS), np.int32)


def extend_paths(
    weights: NDArray[np.float32],
    lengths: NDArray[np.integer],
    slots: NDArray[np.integer],
    frames: NDArray[np.integer],
    scores: NDArray[np.int32],
) -> Origins:
    """Extend the paths of n texts by one frame and return their origins [n, 1 + width].

    `weights` [n, heads, width] is the attention of the frame, `frames` [n] its number in the turn, from 0, and
    `lengths` [n] the tokens of each text. Updates the scores of `slots` [n]. Entries after a text are undefined.
    """
    width = weights.shape[2]
    token = np.arange(width, dtype=np.int64)
    before = scores[slots, (frames - 1) % KEPT_FRAMES, :width].astype(np.int64)
    arrivals, origins = _arrivals(before, token)
    # A path starts at the first token; a later start leaves out those before it.
    arrivals[frames == 0] = -SKIP_PENALTY * token
    after = arrivals + _emissions(weights)
    scores[slots, frames % KEPT_FRAMES, :width] = after
    out = np.empty((len(weights), 1 + width), np.int16)
    out[:, 0] = np.where(token < lengths[:, None], after, np.iinfo(np.int64).min).argmax(1)
    out[:, 1:] = origins
    return out


def _emissions(weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the logarithms of the weights [n, heads, width], means over the heads, in steps."""
    mean = weights.mean(1, dtype=np.float32)
    found: NDArray[np.int64] = np.floor(np.log(mean + np.float32(FLOOR)) * np.float32(SCALE) + 0.5).astype(np.int64)
    return found


def _arrivals(before: NDArray[np.int64], token: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the best score with which each token is reached, and from which token.

    The penalty is linear in the distance, so the best move from any earlier token is a running maximum. Score and token
    are packed into one integer, so that the earlier token wins if two are equal.
    """
    slope = SKIP_PENALTY * token
    packed = ((before + slope) << INDEX_BITS) | (MAX_TOKENS - 1 - token)
    best = np.maximum.accumulate(packed, axis=1)[:, :-1]
    moved, arrivals, origins = (best >> INDEX_BITS) - slope[:-1], before, np.tile(token, (len(before), 1))
    moves = moved > before[:, 1:]
    origins[:, 1:][moves] = MAX_TOKENS - 1 - (best[moves] & (MAX_TOKENS - 1))
    np.maximum(before[:, 1:], moved, out=arrivals[:, 1:])
    return arrivals, origins


def path_origins(weights: NDArray[np.float32]) -> Origins:
    """Return the origins [frames, 1 + tokens] of all frames of one text from its weights [frames, heads, tokens]."""
    scores, zero, length = new_scores(1), np.zeros(1, np.int64), np.array([weights.shape[2]])
    frames = (extend_paths(each[None], length, zero, zero + number, scores) for number, each in enumerate(weights))
    return np.concatenate(list(frames))
