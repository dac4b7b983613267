"""Running means of the statistics of training steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Diverged(RuntimeError):
    """A loss is NaN or infinite."""


class Means:
    """Running means of step statistics, kept on the device until they are read, so that `note` can be captured."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = names
        self.values = torch.zeros(len(names), device=device)

    @torch.no_grad()
    def note(self, now: Tensor) -> None:
        now = now.detach().float()
        self.values.copy_(torch.where(self.values == 0, now, self.values.lerp(now, 0.02)))

    def read(self, step: int) -> dict[str, float]:
        """Return the current means by name. Raises Diverged."""
        found = dict(zip(self.names, self.values.tolist(), strict=True))
        if not all(math.isfinite(value) for value in found.values()):
            raise Diverged(f"step {step}: {found}")
        return {key: round(value, 4) for key, value in found.items()}

    def clear(self) -> None:
        self.values.zero_()
