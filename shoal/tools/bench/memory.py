"""Memory use: of the device on a GPU, of this process on a CPU."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from shoal.paths import peak_rss_bytes, rss_bytes

if TYPE_CHECKING:
    from shoal.engine.core import EngineCore


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


def module_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; shared tensors count once."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def memory_parts(core: "EngineCore") -> dict[str, int]:
    """Return the bytes of the model's weights, the codec's weights and the KV cache of an engine."""
    checkpoint = core.checkpoint
    return {
        "model": module_bytes(checkpoint.model),
        "codec": module_bytes(checkpoint.codec),
        "kv": core.host_cache.kv.nbytes,
    }
