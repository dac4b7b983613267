"""Triton where there is one. Without it the kernels cannot be launched, and nothing else changes."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["jit", "next_power_of_two", "tl", "triton", "usable"]

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None


def jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


def usable(device: torch.device) -> bool:
    """Whether kernels run on tensors of this device: on a GPU, or anywhere under Triton's interpreter."""
    if triton is None:
        return False
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


def next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
