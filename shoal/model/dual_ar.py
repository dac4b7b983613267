"""The DualAR model: slow and fast transformer."""

import torch
from torch import Tensor, nn

from shoal.model.config import DualARConfig
from shoal.model.fast import FastTransformer
from shoal.model.slow import SlowTransformer


class DualAR(nn.Module):
    """Text-to-codes model: a slow transformer over time and a fast transformer over the codebooks of each frame."""

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
        """Select the input of the fast transformer: the hidden state before or after the slow model's final norm."""
        return normed if self.config.norm_fastlayer_input else hidden
