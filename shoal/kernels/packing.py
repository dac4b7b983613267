"""Frames of several streams in one row, one stream behind the other, and whose each is.

Streams of any lengths fill a call of one size this way, and nothing is computed for a place that nobody fills but the
few at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """Of every frame [F], in int32: the slot of its stream, the first frame of the stream here, how many it has.

    Whatever fills up is a stream of its own in a spare slot, with a count of 0: nothing of it is kept.
    """

    slots: Tensor
    starts: Tensor
    counts: Tensor

    def rate(self, x: Tensor) -> int:
        """Rows of x [F x rate, channels] per frame."""
        return len(x) // len(self.slots)

    def streams(self) -> list[tuple[int, int, int]]:
        """Slot, first frame and frames of every stream, for references; one that fills up has none."""
        rows = zip(self.slots.tolist(), self.starts.tolist(), self.counts.tolist(), strict=True)
        return [row for place, row in enumerate(rows) if row[1] == place]
