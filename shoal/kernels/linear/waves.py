"""Width of product tiles by the number of multiprocessors, so that few of them idle in the last wave of programs.

The tiles were chosen on an H200 with 132 multiprocessors. On a card with 58, a product of 64 programs takes as long as
one of 116. Narrower tiles make more programs of less work; they do not change the order of sums.
"""

import torch

from shoal.kernels.jit import HOPPER_SHARED_MEMORY, multiprocessor_count, shared_memory_limit

MIN_WIDTH = 16
# A narrower tile reads the inputs more often, so it has to fill the card better by at least this factor.
MIN_GAIN = 1.1


def card_width(width: int, outputs: int, others: int, device: torch.device) -> int:
    """Return the tile width of a product on this card: `width`, or a half or a quarter of it.

    `others` is the number of programs per tile of outputs: tiles of rows, times splits of K. Cards with the shared
    memory of Hopper keep the widths that were measured there.
    """
    if shared_memory_limit(device) >= HOPPER_SHARED_MEMORY:
        return width
    return balanced_width(width, outputs, others, multiprocessor_count(device))


def balanced_width(width: int, outputs: int, others: int, multiprocessors: int) -> int:
    """Return the widest of `width` and its halves that no narrower one beats by the factor MIN_GAIN."""
    narrower = [size for size in (width // 2, width // 4) if size >= MIN_WIDTH]
    best = width
    for size in narrower:
        gain = _utilization(size, outputs, others, multiprocessors)
        if gain >= MIN_GAIN * _utilization(best, outputs, others, multiprocessors):
            best = size
    return best


def _utilization(width: int, outputs: int, others: int, multiprocessors: int) -> float:
    return wave_utilization(-(-outputs // width) * others, multiprocessors)


def wave_utilization(programs: int, multiprocessors: int) -> float:
    """Return the share of multiprocessors that have work, on average over the waves of a launch."""
    waves = -(-programs // multiprocessors)
    return programs / (waves * multiprocessors)
