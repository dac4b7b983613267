"""Quantized KV cache: one byte per element, one scale per token and head.

A token is written once, and its scale depends on nothing else. The stored bytes are therefore the same whether a prompt
was prefilled in one chunk or in many, alone or in a batch, for the first time or again after a preemption. A scale per
block would change with every token that is added to the block.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

SCALE_DTYPE = torch.float16
# Largest magnitude of a quantized dtype; int8 is used symmetrically.
QMAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class KVScales(TypedDict):
    """Scales [blocks, block_size, kv_heads] of one layer's KV cache, as keyword arguments; None if not quantized."""

    key_scales: Tensor | None
    value_scales: Tensor | None


def quantize_kv(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize x [..., d] to `dtype`; return q [..., d] and scales [...] with x ≈ q * scale."""
    wide = x.float()
    # The scale is never zero, and is rounded to its stored precision before it is used.
    scales = (wide.abs().amax(-1) / QMAX[dtype]).clamp_min(2.0**-24).to(SCALE_DTYPE)
    q = (wide / scales.float()[..., None]).clamp(-QMAX[dtype], QMAX[dtype])
    return (torch.floor(q + 0.5) if dtype == torch.int8 else q).to(dtype), scales


def write_kv(cache: Tensor, scales: Tensor | None, slots: Tensor, x: Tensor) -> None:
    """Write x [n, kv_heads, d] to token slots [n] of cache [blocks, block_size, kv_heads, d].

    With `scales`, x is quantized to the dtype of the cache.
    """
    if scales is None:
        cache.flatten(0, 1).index_copy_(0, slots, x)
        return
    q, new_scales = quantize_kv(x, cache.dtype)
    # Copied as bytes: index_copy_ does not support every quantized dtype.
    cache.flatten(0, 1).view(torch.uint8).index_copy_(0, slots, q.view(torch.uint8))
    scales.flatten(0, 1).index_copy_(0, slots, new_scales)


def dequantize_kv(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return q [..., d] times scales [...] in `dtype`."""
    return (q.float() * scales.float()[..., None]).to(dtype)
