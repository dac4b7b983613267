"""Between the joint projection and attention: QK-norm, rotation, and the new keys and values into their blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.jit import await_previous, jit, kernel, runs_ahead, tl
from shoal.kernels.kv_quant import TOPS, put_columns
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.rope import rotate


def place_qkv_reference(
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
    put_columns(keys, key_scales, where, rotate(k, rows))
    put_columns(values, value_scales, where, v.contiguous())
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
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    TOP: tl.constexpr,
    ROUNDED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        await_previous()
    row, head = tl.program_id(0), tl.program_id(1)
    kind = qkv.dtype.element_ty
    pair = tl.arange(0, HALF)
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * D
    even = tl.load(source + 2 * pair)
    odd = tl.load(source + 2 * pair + 1)
    position = tl.load(positions + row)
    block = tl.load(tables + tl.load(slots + row) * WIDTH + position // SIZE)
    place = block.to(tl.int64) * SIZE + position % SIZE
    if head >= HEADS + KV_HEADS:
        where = place * KV_HEADS + head - HEADS - KV_HEADS
        _store(values + where * D, value_scales + where, pair, even, odd, TOP, ROUNDED)
    else:
        a, b = even.to(tl.float32), odd.to(tl.float32)
        if NORMED:
            norm = q_norm if head < HEADS else k_norm
            scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / D + eps)
            a = ((a * scale).to(kind) * tl.load(norm + 2 * pair)).to(kind).to(tl.float32)
            b = ((b * scale).to(kind) * tl.load(norm + 2 * pair + 1)).to(kind).to(tl.float32)
        angle = rope + position * D
        cos, sin = tl.load(angle + 2 * pair), tl.load(angle + 2 * pair + 1)
        even, odd = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
        if head < HEADS:
            target = out + (row * HEADS + head) * D
            tl.store(target + 2 * pair, even)
            tl.store(target + 2 * pair + 1, odd)
        else:
            where = place * KV_HEADS + head - HEADS
            _store(keys + where * D, key_scales + where, pair, even, odd, TOP, ROUNDED)


@jit
def _store(target, scale_target, pair, even, odd, TOP: tl.constexpr, ROUNDED: tl.constexpr):
    """One head of one column; with a TOP, `quantise_columns` of it."""
    if TOP:
        a, b = even.to(tl.float32), odd.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(a), axis=0), tl.max(tl.abs(b), axis=0))
        scale = tl.maximum(largest / TOP, 5.9604644775390625e-08).to(scale_target.dtype.element_ty)
        tl.store(scale_target, scale)
        a, b = a / scale.to(tl.float32), b / scale.to(tl.float32)
        a, b = tl.minimum(tl.maximum(a, -TOP), TOP), tl.minimum(tl.maximum(b, -TOP), TOP)
        if ROUNDED:
            a, b = tl.floor(a + 0.5), tl.floor(b + 0.5)
        even, odd = a.to(target.dtype.element_ty), b.to(target.dtype.element_ty)
    tl.store(target + 2 * pair, even)
    tl.store(target + 2 * pair + 1, odd)


def place_qkv(
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
    """`place_qkv_reference` in one launch."""
    size, kv_heads, d = keys.shape[1:]
    heads = qkv.shape[1] // d - 2 * kv_heads
    out = torch.empty(len(qkv), heads, d, dtype=qkv.dtype, device=qkv.device)
    ahead = runs_ahead(qkv.device)
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
        HALF=d // 2,
        NORMED=q_norm is not None,
        TOP=0 if key_scales is None else int(TOPS[keys.dtype]),
        ROUNDED=keys.dtype == torch.int8,
        AHEAD=ahead,
        num_warps=1,
        launch_pdl=ahead,
    )
    return out
