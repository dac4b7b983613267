"""Rotary position embedding over interleaved pairs (2i, 2i+1), with tables rounded to bfloat16.

The models were trained with bf16 tables; exact tables shift the logits and garble long audio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.jit import jit, tl


def rope_table(length: int, head_dim: int, base: float, device: torch.device | str | None = None) -> Tensor:
    """Return (cos, sin) [length, head_dim // 2, 2] in fp32, rounded to values that bf16 can represent."""
    # Always computed on the CPU: the last bit of cos differs between devices and can survive the rounding to bf16.
    # In upstream's fp32 arithmetic: `rope_values`, from fp64, differs in 3 of the 1,048,576 values of S1-mini.
    exponent = torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim
    angle = torch.outer(torch.arange(length, device="cpu", dtype=torch.float32), 1.0 / (base**exponent))
    table = torch.stack((angle.cos(), angle.sin()), dim=-1)
    return table.bfloat16().float().to(device)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x [..., heads, head_dim] by table [..., head_dim // 2, 2], one row per position; computes in fp32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    table = table.unsqueeze(-3)
    if has_complex(x.device):
        # The same four products in one operator: the overhead of operators dominates a small step.
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))
        return rotated.flatten(-2).to(x.dtype)
    cos, sin = table.unbind(-1)
    even, odd = pairs.unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def has_complex(device: torch.device) -> bool:
    """Return whether the device multiplies complex numbers; not every version of torch does on Apple's GPUs."""
    return device.type != "mps"


@jit
def split_pairs(x, D: tl.constexpr):
    """Return the even and the odd elements of x [D]."""
    return tl.split(tl.reshape(x, (D // 2, 2)))


@jit
def rotate_head(x, cos, sin, D: tl.constexpr):
    """Rotate one head x [D] like `rotate`; cos and sin are [D / 2]."""
    even, odd = split_pairs(x.to(tl.float32), D)
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (D,)).to(x.dtype)
