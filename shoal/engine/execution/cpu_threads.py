"""Number of torch threads on a CPU: small matrix products are faster on one thread."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.cores import default_threads
from shoal.model.dual_ar import DualAR

# Measured with nano on two cores: one sequence is 20 % faster on one thread, sixteen are 20 % faster on two.
SMALL_MODEL = 100_000_000  # parameters
FEW_TOKENS = 8


def limit_threads() -> None:
    """Reduce torch's threads, one per core of the host, to the cores that a container's CPU quota allows."""
    if default_threads() < torch.get_num_threads():
        torch.set_num_threads(default_threads())


@contextmanager
def single_thread() -> Iterator[None]:
    """Run torch operators of the calling thread on one thread inside the block.

    Loading a small model is hundreds of short operators. Distributed over threads they take twice the CPU time on idle
    cores, and many times as long where another process is busy: each operator waits for the thread that was preempted.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
