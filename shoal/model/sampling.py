"""Sampling parameters of a batch as tensors, one entry per sequence."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.model.sampling_settings import SamplingSettings
from shoal.speech import SamplingParams

DTYPES = {
    "temperature": torch.float32,
    "top_p": torch.float32,
    "top_k": torch.long,
    "penalty": torch.float32,
    "whole_window": torch.bool,
    "seed": torch.long,
}
TENSOR_FIELDS = tuple(DTYPES)


@dataclass(slots=True)
class SamplingTensors:
    """Sampling parameters of n sequences; every tensor is [n]."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    penalty: Tensor
    whole_window: Tensor  # True where the penalty applies to all semantic tokens of the window
    seed: Tensor
    has_penalty: bool  # whether any sequence has a penalty; kept on the host to avoid a device synchronisation

    @classmethod
    def from_settings(cls, settings: list[SamplingParams], device: torch.device) -> "SamplingTensors":
        rows = [SamplingSettings.of(each) for each in settings]
        tensors = {
            name: torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=device)
            for name, dtype in DTYPES.items()
        }
        return cls(**tensors, has_penalty=any(row.penalty != 1.0 for row in rows))

    def select(self, index: Tensor, *, has_penalty: bool) -> "SamplingTensors":
        """Return the settings of the sequences `index`, in that order."""
        return replace(self, has_penalty=has_penalty, **{name: getattr(self, name)[index] for name in TENSOR_FIELDS})
