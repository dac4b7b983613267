"""How much memory is in use: of the device where there is one, of this process on a CPU."""

import resource
import sys
from pathlib import Path

import torch


class MemoryGauge:
    """Reads what one device holds on behalf of this process, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def kind(self) -> str:
        return "VRAM" if self._device.type == "cuda" else "RSS"

    def now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_reserved(self._device)
        return resident_bytes()

    def peak(self) -> int:
        """The most it has been since the process began."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return max(peak_resident_bytes(), self.now())


def resident_bytes() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return peak_resident_bytes()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) * 1024


def peak_resident_bytes() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
