"""Number of torch threads per step on a CPU: small matrix products are faster on one thread."""

import torch

from shoal.model.dual_ar import DualAR

# Measured with nano on two cores: one sequence is 20 % faster on one thread, sixteen are 20 % faster on two.
SMALL_MODEL = 100_000_000  # parameters
FEW_TOKENS = 8


class CPUThreads:
    """Sets the thread count of the calling thread, at most the count configured at construction."""

    def __init__(self, model: DualAR) -> None:
        self.max_threads = torch.get_num_threads()
        small = sum(weight.numel() for weight in model.parameters()) < SMALL_MODEL
        self._few = FEW_TOKENS if small and model.device.type == "cpu" else 0

    def choose(self, tokens: int) -> None:
        """Set the thread count for a step over `tokens` tokens."""
        threads = 1 if tokens <= self._few else self.max_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
