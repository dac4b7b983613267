"""Between the joint projection and attention: QK-norm, rotation, and the new keys and values into their blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.jit import jit, kernel, launch_dependents_and_wait, supports_pdl, tl
from shoal.kernels.kv_quant import QMAX, write_kv
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.rope import halves, rotate, rotated


def rope_and_cache_reference(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Joint projections qkv [n, (heads + 2 kv_heads) d] -> rotated queries [n, heads, d].

    Row i is column positions[i] of slot slots[i]: keys and values [blocks, size, kv_heads, d] get its own at the place
    that tables [slots, blocks] names, quantised if they have scales [blocks, size, kv_heads]. rope [length, d / 2, 2]
    is the model's.
    """
    size, kv_heads, d = keys.shape[1:]
    q, k, v = qkv.unflatten(-1, (-1, d)).split((qkv.shape[1] // d - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    positions = positions.long()
    where = tables[slots.long(), positions // size].long() * size + positions % size
    rows = rope[positions]
    write_kv(keys, key_scales, where, rotate(k, rows))
    write_kv(values, value_scales, where, v.contiguous())
    return rotate(q, rows)


@kernel()
def _place_kernel(
    qkv,
    q_norm,
    k_norm,
    eps,
    rope,
    positions,
    keys,
    values,
    tables,
    slots,
    key_scales,
    value_scales,
    out,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    NORMED: tl.constexpr,
    TOP: tl.constexpr,
    ROUNDED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    # Where the row is has come from the host, and no kernel touches it.
    position = tl.load(positions + row)
    block = tl.load(tables + tl.load(slots + row) * WIDTH + position // SIZE)
    place = block.to(tl.int64) * SIZE + position % SIZE
    cos, sin = halves(tl.load(rope + position * D + d), D)
    if AHEAD:
        launch_dependents_and_wait()
    x = tl.load(qkv + (row * (HEADS + 2 * KV_HEADS) + head) * D + d)
    if head >= HEADS + KV_HEADS:
        where = place * KV_HEADS + head - HEADS - KV_HEADS
        _store(values + where * D + d, value_scales + where, x, TOP, ROUNDED)
    else:
        if NORMED:
            norm, wide = q_norm if head < HEADS else k_norm, x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
            x = ((wide * scale).to(x.dtype) * tl.load(norm + d)).to(x.dtype)
        x = rotated(x, cos, sin, D)
        if head < HEADS:
            tl.store(out + (row * HEADS + head) * D + d, x)
        else:
            where = place * KV_HEADS + head - HEADS
            _store(keys + where * D + d, key_scales + where, x, TOP, ROUNDED)


@jit
def _store(target, scale_target, x, TOP: tl.constexpr, ROUNDED: tl.constexpr):
    """One head of one column; with a TOP, `quantize_kv` of it."""
    if TOP:
        x = x.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(x), axis=0) / TOP, 5.9604644775390625e-08).to(scale_target.dtype.element_ty)
        tl.store(scale_target, scale)
        x = tl.minimum(tl.maximum(x / scale.to(tl.float32), -TOP), TOP)
        if ROUNDED:
            x = tl.floor(x + 0.5)
        x = x.to(target.dtype.element_ty)
    tl.store(target, x)


def rope_and_cache(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """`rope_and_cache_reference` in one launch."""
    size, kv_heads, d = keys.shape[1:]
    heads = qkv.shape[1] // d - 2 * kv_heads
    out = torch.empty(len(qkv), heads, d, dtype=qkv.dtype, device=qkv.device)
    ahead = supports_pdl(qkv.device)
    _place_kernel[(len(qkv), heads + 2 * kv_heads)](
        qkv,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        eps,
        rope,
        positions,
        keys,
        values,
        tables,
        slots,
        keys if key_scales is None else key_scales,
        values if value_scales is None else value_scales,
        out,
        WIDTH=tables.shape[1],
        SIZE=size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        NORMED=q_norm is not None,
        TOP=0 if key_scales is None else int(QMAX[keys.dtype]),
        ROUNDED=keys.dtype == torch.int8,
        AHEAD=ahead,
        num_warps=1,
        launch_pdl=ahead,
    )
    return out
