"""Packed (ragged) batches: frames of several streams, concatenated along time.

Streams of any lengths fill a fixed-size call this way; only the padding at the end is wasted work.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """Per frame [F], in int32: the slot of its stream, the index of the stream's first frame, and its frame count.

    Each padding frame is a stream of its own in a spare slot with a count of 0; its state is not kept.
    """

    slots: Tensor
    starts: Tensor
    counts: Tensor

    def rate(self, x: Tensor) -> int:
        """Return the rows of x [F x rate, channels] per frame."""
        return len(x) // len(self.slots)

    def streams(self) -> list[tuple[int, int, int]]:
        """Return (slot, first frame, frame count) of every stream, 0 for padding. Synchronizes with the device."""
        rows = zip(self.slots.tolist(), self.starts.tolist(), self.counts.tolist(), strict=True)
        return [row for index, row in enumerate(rows) if row[1] == index]
