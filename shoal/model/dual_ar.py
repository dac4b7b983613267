"""Both transformers together."""

import torch
from torch import Tensor, nn

from shoal.model.config import DualARConfig
from shoal.model.fast import FastTransformer
from shoal.model.slow import SlowTransformer


class DualAR(nn.Module):
    """The text-to-codes model: a slow transformer over time, a fast one over the codebooks of each frame."""

    def __init__(self, config: DualARConfig) -> None:
        super().__init__()
        self.config = config
        self.slow = SlowTransformer(config)
        self.fast = FastTransformer(config)

    @property
    def device(self) -> torch.device:
        return self.slow.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.slow.norm.weight.dtype

    def fast_input(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """What the fast transformer is given: the families differ in whether the final norm comes before."""
        return normed if self.config.norm_fastlayer_input else hidden
