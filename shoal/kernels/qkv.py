"""Between the joint projection and attention: QK-norm, rotation, and the new keys and values into their blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.jit import jit, tl
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.rope import rotate


def place_qkv_reference(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    table: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    where: Tensor,
) -> Tensor:
    """Joint projections qkv [n, (heads + 2 kv_heads) d] -> rotated queries [n, heads, d].

    keys and values [places, kv_heads, d] get the new rows at `where` [n]; table [length, d / 2, 2] is the model's.
    """
    kv_heads, d = keys.shape[1:]
    q, k, v = qkv.unflatten(-1, (-1, d)).split((qkv.shape[1] // d - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    rows = table[positions]
    keys.index_copy_(0, where, rotate(k, rows))
    values.index_copy_(0, where, v.contiguous())
    return rotate(q, rows)


@jit
def _place_kernel(
    qkv,
    q_norm,
    k_norm,
    eps,
    table,
    positions,
    keys,
    values,
    where,
    out,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    kind = qkv.dtype.element_ty
    pair = tl.arange(0, HALF)
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * D
    even = tl.load(source + 2 * pair)
    odd = tl.load(source + 2 * pair + 1)
    place = tl.load(where + row)
    if head >= HEADS + KV_HEADS:
        target = values + (place * KV_HEADS + head - HEADS - KV_HEADS) * D
        tl.store(target + 2 * pair, even)
        tl.store(target + 2 * pair + 1, odd)
    else:
        a, b = even.to(tl.float32), odd.to(tl.float32)
        if NORMED:
            norm = q_norm if head < HEADS else k_norm
            scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / D + eps)
            a = ((a * scale).to(kind) * tl.load(norm + 2 * pair)).to(kind).to(tl.float32)
            b = ((b * scale).to(kind) * tl.load(norm + 2 * pair + 1)).to(kind).to(tl.float32)
        angle = table + tl.load(positions + row) * D
        cos, sin = tl.load(angle + 2 * pair), tl.load(angle + 2 * pair + 1)
        if head < HEADS:  # noqa: SIM108 - pointers of two buffers, which a select would have to unify
            target = out + (row * HEADS + head) * D
        else:
            target = keys + (place * KV_HEADS + head - HEADS) * D
        tl.store(target + 2 * pair, (a * cos - b * sin).to(kind))
        tl.store(target + 2 * pair + 1, (b * cos + a * sin).to(kind))


def place_qkv(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    table: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    where: Tensor,
) -> Tensor:
    """`place_qkv_reference` in one launch."""
    kv_heads, d = keys.shape[1:]
    heads = qkv.shape[1] // d - 2 * kv_heads
    out = torch.empty(len(qkv), heads, d, dtype=qkv.dtype, device=qkv.device)
    _place_kernel[(len(qkv), heads + 2 * kv_heads)](
        qkv,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        eps,
        table,
        positions,
        keys,
        values,
        where,
        out,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        HALF=d // 2,
        NORMED=q_norm is not None,
        num_warps=1,
    )
    return out
