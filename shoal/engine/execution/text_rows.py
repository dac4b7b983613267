"""Rows of a step whose attention over the text of their turn is read."""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.engine.scheduling.sequence import Sequence

# Widths of the result are multiples of this, so that few shapes are allocated.
WIDTH_STEP = 64


@dataclass(frozen=True, slots=True)
class TextRows:
    """Sampled rows of a step whose sequences have a text span. False if there are none."""

    rows: list[int]  # in the order of the sampled sequences
    slots: list[int]
    begins: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, sequences: Ordered[Sequence]) -> "TextRows":
        found = [(row, each.slot, *each.text) for row, each in enumerate(sequences) if each.text is not None]
        return cls(*([each[column] for each in found] for column in range(4)))

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def width(self) -> int:
        """Longest text in tokens, rounded up."""
        return -(-max(self.lengths) // WIDTH_STEP) * WIDTH_STEP

    def table(self) -> NDArray[np.int32]:
        """Return [4, texts]: row, slot, first position and length of each."""
        return np.array((self.rows, self.slots, self.begins, self.lengths), np.int32)

    def renumbered(self, rows: Ordered[int]) -> "TextRows":
        """Return the same texts with row i replaced by rows[i]."""
        return replace(self, rows=[rows[row] for row in self.rows])
