"""One number against its limit."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Largest absolute differences allowed in fp32; what is made of integers has to be equal.
LOGITS = 5e-5
PROBABILITIES = 1e-6
AUDIO = 2e-5
INTERMEDIATE = 1e-4  # of the codec
QUANTISED = 1e-4
STREAMED = 1e-5  # pieces of a stream against our own decode of the whole


@dataclass(frozen=True, slots=True)
class ParityComparison:
    """`difference` is the largest absolute one, or the number of unequal entries where `tolerance` is 0."""

    group: str
    name: str
    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance  # NaN is not

    @property
    def strain(self) -> float:
        """How much of the tolerance is used: above 1 it failed."""
        if math.isnan(self.difference):
            return math.inf
        if self.tolerance == 0:
            return math.inf if self.difference else 0.0
        return self.difference / self.tolerance


def close(group: str, name: str, ours: Tensor, stored: Tensor, tolerance: float) -> ParityComparison:
    if ours.shape != stored.shape:
        return ParityComparison(group, name, math.inf, tolerance)
    apart = (ours.float().cpu() - stored.float()).abs()
    return ParityComparison(group, name, float(apart.max()) if apart.numel() else 0.0, tolerance)


def equal(group: str, name: str, ours: Tensor, stored: Tensor) -> ParityComparison:
    if ours.shape != stored.shape:
        return ParityComparison(group, name, float(max(ours.numel(), stored.numel(), 1)), 0.0)
    return ParityComparison(group, name, float((ours.cpu() != stored).sum()), 0.0)


def equal_lists(group: str, name: str, ours: list[int], stored: list[int]) -> ParityComparison:
    return equal(group, name, torch.tensor(ours, dtype=torch.long), torch.tensor(stored, dtype=torch.long))
