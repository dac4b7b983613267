"""Comparison of one computed result with its stored reference."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Maximum absolute differences in fp32; integer results must be equal.
LOGITS = 5e-5
PROBABILITIES = 1e-6
AUDIO = 2e-5
INTERMEDIATE = 1e-4  # intermediate tensors of the codec
QUANTIZED = 1e-4
STREAMED = 1e-5  # streamed chunks against our own decode of the whole utterance


@dataclass(frozen=True, slots=True)
class ParityComparison:
    """Result of one comparison.

    `difference` is the maximum absolute difference, or the number of unequal elements where `tolerance` is 0.
    """

    group: str
    name: str
    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance  # false for NaN

    @property
    def strain(self) -> float:
        """Difference as a multiple of the tolerance; above 1 the comparison failed."""
        if math.isnan(self.difference):
            return math.inf
        if self.tolerance == 0:
            return math.inf if self.difference else 0.0
        return self.difference / self.tolerance


def close(group: str, name: str, ours: Tensor, stored: Tensor, tolerance: float) -> ParityComparison:
    if ours.shape != stored.shape:
        return ParityComparison(group, name, math.inf, tolerance)
    difference = (ours.float().cpu() - stored.float()).abs()
    return ParityComparison(group, name, float(difference.max()) if difference.numel() else 0.0, tolerance)


def equal(group: str, name: str, ours: Tensor, stored: Tensor) -> ParityComparison:
    if ours.shape != stored.shape:
        return ParityComparison(group, name, float(max(ours.numel(), stored.numel(), 1)), 0.0)
    return ParityComparison(group, name, float((ours.cpu() != stored).sum()), 0.0)


def equal_lists(group: str, name: str, ours: list[int], stored: list[int]) -> ParityComparison:
    return equal(group, name, torch.tensor(ours, dtype=torch.long), torch.tensor(stored, dtype=torch.long))
