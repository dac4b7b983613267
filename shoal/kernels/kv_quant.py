"""Keys and values in a byte each, with one scale per column and head.

A column is written once, whole, and its scale depends on nothing but itself: what is stored is the same whether a
prompt was computed in one piece or in many, alone or beside others, the first time or again after it had to give way.
A scale for a whole block would change with every column that is added to it.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

SCALE_DTYPE = torch.float16
# Largest value of a type; int8 is used symmetrically.
QMAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class KVScales(TypedDict):
    """Of one layer's memory, [blocks, size, kv_heads] each, under the names that kernels know; None if it has none."""

    key_scales: Tensor | None
    value_scales: Tensor | None


def quantize_kv(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., d] -> the same in `kind`, and scales [...]: x = q · scale."""
    wide = x.float()
    # Never zero, and rounded to what is stored before it is used.
    scales = (wide.abs().amax(-1) / QMAX[kind]).clamp_min(2.0**-24).to(SCALE_DTYPE)
    q = (wide / scales.float()[..., None]).clamp(-QMAX[kind], QMAX[kind])
    return (torch.floor(q + 0.5) if kind == torch.int8 else q).to(kind), scales


def write_kv(memory: Tensor, scales: Tensor | None, where: Tensor, x: Tensor) -> None:
    """Write x [n, kv_heads, d] to its places in memory [blocks, size, kv_heads, d], quantised if that has scales."""
    if scales is None:
        memory.flatten(0, 1).index_copy_(0, where, x)
        return
    q, new = quantize_kv(x, memory.dtype)
    # As plain bytes: not every type can be copied by index.
    memory.flatten(0, 1).view(torch.uint8).index_copy_(0, where, q.view(torch.uint8))
    scales.flatten(0, 1).index_copy_(0, where, new)


def dequantize_kv(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., d] in `dtype`"""
    return (q.float() * scales.float()[..., None]).to(dtype)
