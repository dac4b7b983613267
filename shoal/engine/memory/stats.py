"""Memory of the engine process on host and device, and recovery from out-of-memory errors."""

import logging
import re
from pathlib import Path

import torch

from shoal.paths import rss_bytes

logger = logging.getLogger(__name__)

MEMINFO = Path("/proc/meminfo")
# Bytes that a GPU which shares the host's memory leaves to the host.
HOST_RESERVE = 1 << 30


def memory_stats(device: torch.device) -> dict[str, dict[str, int]]:
    """Return bytes of host memory (resident) and, with a GPU, of `vram`: used, total, and allocated by this process."""
    stats = {"host": {"resident": rss_bytes()}}
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        free = free_memory(device)
        allocated = torch.cuda.memory_allocated(device)
        stats["vram"] = {"used": total - free, "all": total, "allocated": allocated}
    return stats


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that can be allocated.

    Where host and GPU share the memory (Jetson, DGX Spark), the driver does not count what files are cached in, which
    soon is most of it. Linux frees that when it is needed.
    """
    free: int = torch.cuda.mem_get_info(device)[0]
    shared = getattr(torch.cuda.get_device_properties(device), "is_integrated", False)
    if not shared or torch.version.hip is not None or not MEMINFO.exists():
        return free
    kilobytes = re.search(r"^MemAvailable: +(\d+) kB$", MEMINFO.read_text(), re.M)
    return free if kilobytes is None else max(free, 1024 * int(kilobytes[1]) - HOST_RESERVE)


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
