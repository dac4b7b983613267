"""How the rows of a batch are sampled: their settings as tensors, and the constants of both families' recipes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.speech import SamplingParams

S1_WINDOW = 16
S2_WINDOW = 10


@dataclass(slots=True)
class SamplingTensors:
    """The sampling settings of n sequences, one row each."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    penalty: Tensor
    whole_window: Tensor  # True where the penalty looks at all main tokens of the window
    seed: Tensor
    has_penalty: bool  # whether any row has a penalty: known on the host, so that nobody has to ask the device

    @classmethod
    def from_settings(cls, settings: list[SamplingParams], device: torch.device) -> "SamplingTensors":
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=column([s.temperature for s in settings], torch.float32),
            top_p=column([s.top_p for s in settings], torch.float32),
            top_k=column([s.top_k or 2**31 for s in settings], torch.long),
            penalty=column([s.repetition_penalty for s in settings], torch.float32),
            whole_window=column([s.repetition == "window" for s in settings], torch.bool),
            seed=torch.tensor([fold_seed(s.seed) for s in settings], dtype=torch.long, device=device),
            has_penalty=any(s.repetition_penalty != 1.0 for s in settings),
        )

    def select(self, index: Tensor, *, has_penalty: bool) -> "SamplingTensors":
        """The settings of some rows, in the order of `index`."""
        return replace(self, has_penalty=has_penalty, **{name: getattr(self, name)[index] for name in TENSOR_FIELDS})


TENSOR_FIELDS = ("temperature", "top_p", "top_k", "penalty", "whole_window", "seed")


def fold_seed(seed: int) -> int:
    """A 64-bit seed in 32 bits."""
    return (seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF
