"""Memory use: of the device on a GPU, of this process on a CPU."""

import torch

from shoal.paths import peak_rss_bytes, rss_bytes


class MemoryGauge:
    """Memory of this process on one device, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def kind(self) -> str:
        return "VRAM" if self._device.type == "cuda" else "RSS"

    def now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_reserved(self._device)
        return rss_bytes() or peak_rss_bytes()

    def peak(self) -> int:
        """Return the maximum since the process started."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return max(peak_rss_bytes(), self.now())
