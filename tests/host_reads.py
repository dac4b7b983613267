"""Detects calls that a CUDA graph cannot capture: reads by the host, and tensors made from values of the host."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
FORBIDDEN = {getattr(Tensor, name) for name in READS} | {torch.tensor, torch.as_tensor, torch.nonzero, torch.equal}


class NoHostReads(TorchFunctionMode):
    """Raises RuntimeError when the host reads from a tensor, creates one from its own values, or selects by a mask."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if func in FORBIDDEN or (func is Tensor.__getitem__ and _is_mask(args[1])):
            raise RuntimeError(f"{func.__name__} cannot be captured")
        return func(*args, **(kwargs or {}))


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool
