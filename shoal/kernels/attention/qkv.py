"""QK-norm, RoPE and paged KV cache write: everything between the QKV projection and attention in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.attention.kv_quant import QMAX, write_kv
from shoal.kernels.jit import jit, kernel, launch_dependents_and_wait, supports_pdl, tl
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.rope import rotate, rotate_head, split_pairs


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
    """Return rotated queries [n, heads, d] of qkv [n, (heads + 2 kv_heads) d]; write keys and values to the KV cache.

    Row i is the token at positions[i] of slot slots[i]. The block tables [slots, blocks] locate it in keys and values
    [blocks, block_size, kv_heads, d], which are quantized if they have scales [blocks, block_size, kv_heads]. rope is
    the model's table [length, d / 2, 2].
    """
    block_size, kv_heads, d = keys.shape[1:]
    q, k, v = qkv.unflatten(-1, (-1, d)).split((qkv.shape[1] // d - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    positions = positions.long()
    where = tables[slots.long(), positions // block_size].long() * block_size + positions % block_size
    angles = rope[positions]
    write_kv(keys, key_scales, where, rotate(k, angles))
    write_kv(values, value_scales, where, v.contiguous())
    return rotate(q, angles)


@kernel()
def _rope_and_cache_kernel(
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
    TABLE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    QK_NORM: tl.constexpr,
    QMAX: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    # Positions, slots and block tables are uploaded by the host and written by no kernel: no need to wait for them.
    position = tl.load(positions + row)
    block = tl.load(tables + tl.load(slots + row) * TABLE_WIDTH + position // BLOCK_SIZE)
    token = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    cos, sin = split_pairs(tl.load(rope + position * D + d), D)
    if PDL:
        launch_dependents_and_wait()
    x = tl.load(qkv + (row * (HEADS + 2 * KV_HEADS) + head) * D + d)
    if head >= HEADS + KV_HEADS:
        where = token * KV_HEADS + head - HEADS - KV_HEADS
        _store_head(values + where * D + d, value_scales + where, x, QMAX, ROUND)
    else:
        if QK_NORM:
            norm, wide = q_norm if head < HEADS else k_norm, x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
            x = ((wide * scale).to(x.dtype) * tl.load(norm + d)).to(x.dtype)
        x = rotate_head(x, cos, sin, D)
        if head < HEADS:
            tl.store(out + (row * HEADS + head) * D + d, x)
        else:
            where = token * KV_HEADS + head - HEADS
            _store_head(keys + where * D + d, key_scales + where, x, QMAX, ROUND)


@jit
def _store_head(target, scale_target, x, QMAX: tl.constexpr, ROUND: tl.constexpr):
    """Store one head of one token, quantized like `quantize_kv` if QMAX is not 0."""
    if QMAX:
        x = x.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(x), axis=0) / QMAX, 5.9604644775390625e-08).to(scale_target.dtype.element_ty)
        tl.store(scale_target, scale)
        x = tl.minimum(tl.maximum(x / scale.to(tl.float32), -QMAX), QMAX)
        if ROUND:
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
    """Compute `rope_and_cache_reference` in one launch."""
    block_size, kv_heads, d = keys.shape[1:]
    heads = qkv.shape[1] // d - 2 * kv_heads
    out = torch.empty(len(qkv), heads, d, dtype=qkv.dtype, device=qkv.device)
    pdl = supports_pdl(qkv.device)
    _rope_and_cache_kernel[(len(qkv), heads + 2 * kv_heads)](
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
        TABLE_WIDTH=tables.shape[1],
        BLOCK_SIZE=block_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        QK_NORM=q_norm is not None,
        QMAX=0 if key_scales is None else int(QMAX[keys.dtype]),
        ROUND=keys.dtype == torch.int8,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return out
