"""How much memory is in use: of the device where there is one, of this process on a CPU."""

import torch

from shoal.paths import peak_rss_bytes, rss_bytes


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
        return rss_bytes() or peak_rss_bytes()

    def peak(self) -> int:
        """The most it has been since the process began."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return max(peak_rss_bytes(), self.now())
