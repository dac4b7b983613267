"""SamplingParams settings of a batch as tensors, one entry per sequence."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.speech import SamplingParams

UNLIMITED_TOP_K = 2**31


@dataclass(slots=True)
class SamplingTensors:
    """SamplingParams settings of n sequences; every tensor is [n]."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    penalty: Tensor
    whole_window: Tensor  # True where the penalty applies to all semantic tokens of the window
    seed: Tensor
    has_penalty: bool  # whether any sequence has a penalty; kept on the host to avoid a device synchronisation

    @classmethod
    def from_settings(cls, settings: list[SamplingParams], device: torch.device) -> "SamplingTensors":
        def tensor(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=tensor([s.temperature for s in settings], torch.float32),
            top_p=tensor([s.top_p for s in settings], torch.float32),
            top_k=tensor([s.top_k or UNLIMITED_TOP_K for s in settings], torch.long),
            penalty=tensor([s.repetition_penalty for s in settings], torch.float32),
            whole_window=tensor([s.repetition == "window" for s in settings], torch.bool),
            seed=torch.tensor([fold_seed(s.seed) for s in settings], dtype=torch.long, device=device),
            has_penalty=any(s.repetition_penalty != 1.0 for s in settings),
        )

    def select(self, index: Tensor, *, has_penalty: bool) -> "SamplingTensors":
        """Return the settings of the sequences `index`, in that order."""
        return replace(self, has_penalty=has_penalty, **{name: getattr(self, name)[index] for name in TENSOR_FIELDS})


TENSOR_FIELDS = ("temperature", "top_p", "top_k", "penalty", "whole_window", "seed")


def fold_seed(seed: int) -> int:
    """Hash a 64-bit seed to 32 bits."""
    return (seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF
