"""Texts of the rows of a step, for reading the attention over them."""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from shoal.engine.scheduling.sequence import Sequence, TextSpan

# Widths of results, in tokens, are multiples of this, so that few shapes are allocated.
WIDTH_STEP = 64
NO_TEXT = TextSpan(0, 0)


@dataclass(frozen=True, slots=True)
class TextRows:
    """Texts of the rows that a launch samples; length 0 for a row without one. Falsy if no row has a text."""

    rows: Ordered[int]  # index of each row among all sampled rows of the step
    slots: list[int]
    begins: Ordered[int]
    lengths: Ordered[int]

    @classmethod
    def of(cls, sequences: Ordered[Sequence], rows: Ordered[int] | None = None) -> "TextRows":
        """Return the texts of these sequences; `rows` are their rows in the step, by default from 0."""
        if not any(each.text for each in sequences):
            return cls((), [], (), ())
        spans = [each.text or NO_TEXT for each in sequences]
        begins, lengths = zip(*spans, strict=True)
        return cls(range(len(spans)) if rows is None else rows, [each.slot for each in sequences], begins, lengths)

    def __bool__(self) -> bool:
        return bool(self.slots)

    @property
    def width(self) -> int:
        """Longest text in tokens, rounded up."""
        return -(-max(self.lengths) // WIDTH_STEP) * WIDTH_STEP

    @property
    def with_text(self) -> list[int]:
        """Return the indices of the rows that have a text."""
        return [index for index, length in enumerate(self.lengths) if length]
