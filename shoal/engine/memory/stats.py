"""What the engine's process holds, on the device and on the host, and how it gives some back."""

import logging

import torch

from shoal.paths import rss_bytes

logger = logging.getLogger(__name__)


def memory_stats(device: torch.device) -> dict[str, dict[str, int]]:
    """Bytes. `vram` is of the whole device, whoever uses it, and of our tensors; a CPU has none."""
    figures = {"host": {"resident": rss_bytes()}}
    if device.type == "cuda":
        free, everything = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        figures["vram"] = {"used": everything - free, "all": everything, "allocated": allocated}
    return figures


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether a failure is one of device memory, however deep in its causes."""
    cause: BaseException | None = problem
    while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
        cause = cause.__cause__
    return cause is not None


def release_cached_memory() -> None:
    """What torch keeps for later and nobody holds goes back to the device.

    What is computed again afterwards then finds memory that is not in pieces too small for it.
    """
    logger.warning("out of device memory: giving back what is not in use")
    torch.cuda.empty_cache()
