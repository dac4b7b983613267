"""How many threads a step is worth on a CPU: over small products several threads mostly wait for each other."""

import torch

from shoal.model.dual_ar import DualAR

# With nano on two cores one voice is a fifth faster on one thread, and sixteen are a fifth faster on two.
SMALL_MODEL = 100_000_000  # parameters
FEW_COLUMNS = 8


class CPUThreads:
    """Chooses for the thread that calls it; what the program had set before is the most it takes."""

    def __init__(self, model: DualAR) -> None:
        self.most = torch.get_num_threads()
        small = sum(weight.numel() for weight in model.parameters()) < SMALL_MODEL
        self._few = FEW_COLUMNS if small and model.device.type == "cpu" else 0

    def choose(self, tokens: int) -> None:
        """For a step over so many tokens."""
        wanted = 1 if tokens <= self._few else self.most
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)
