"""Memory of the engine process on host and device, and recovery from out-of-memory errors."""

import logging

import torch

from shoal.paths import rss_bytes

logger = logging.getLogger(__name__)


def memory_stats(device: torch.device) -> dict[str, dict[str, int]]:
    """Return bytes of host memory (resident) and, with a GPU, of `vram`: used, total, and allocated by this process."""
    stats = {"host": {"resident": rss_bytes()}}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        stats["vram"] = {"used": total - free, "all": total, "allocated": allocated}
    return stats


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or any of its causes, is a torch.OutOfMemoryError."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
        cause = cause.__cause__
    return cause is not None


def release_cached_memory() -> int:
    """Return cached blocks of the torch allocator to the device; return their bytes, 0 without a GPU."""
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved()
