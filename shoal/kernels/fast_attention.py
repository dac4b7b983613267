"""Attention of the fast transformer: at most a frame of keys, so rotation, memory and mixing are one launch.

The memory of a frame is [rows, kv_heads, codebooks, d].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl
from shoal.kernels.rope import halves, rotate, rotated


def fast_attention_reference(qkv: Tensor, table: Tensor, position: int, keys: Tensor, values: Tensor) -> Tensor:
    """One position of a frame: qkv [rows, (heads + 2 kv_heads) d] -> [rows, heads d]; its key and value are kept."""
    kv_heads, d = keys.shape[1], keys.shape[3]
    q, k, v = qkv.unflatten(-1, (-1, d)).split((qkv.shape[1] // d - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    angle = table[position].expand(len(qkv), -1, -1)
    keys[:, :, position] = rotate(k, angle)
    values[:, :, position] = v
    seen = position + 1
    mixed = F.scaled_dot_product_attention(
        rotate(q, angle)[:, :, None], keys[:, :, :seen], values[:, :, :seen], enable_gqa=q.shape[1] != kv_heads
    )
    return mixed.flatten(1)


@kernel("position")
def _fast_attention_kernel(
    qkv,
    table,
    keys,
    values,
    out,
    scale,
    position,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LENGTH: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    AHEAD: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    kind = qkv.dtype.element_ty
    d, column = tl.arange(0, D), tl.arange(0, PADDED)
    cos, sin = halves(tl.load(table + position * D + d), D)
    if AHEAD:
        launch_dependents_and_wait()
    source = qkv + row * (HEADS + 2 * KV_HEADS) * D + d
    memory = ((row * KV_HEADS + kv_head) * LENGTH) * D
    # Everything is read before anything is written: a load behind a store would wait for it.
    query, new_key = tl.load(source + head * D), tl.load(source + (HEADS + kv_head) * D)
    new_value = tl.load(source + (HEADS + KV_HEADS + kv_head) * D)
    place, past = memory + column[:, None] * D + d[None, :], (column < position)[:, None]
    key, value = tl.load(keys + place, mask=past, other=0.0), tl.load(values + place, mask=past, other=0.0)
    query, new_key = rotated(query, cos, sin, D), rotated(new_key, cos, sin, D)
    now = (column == position)[:, None]
    key = tl.where(now, new_key[None, :], key).to(tl.float32)
    value = tl.where(now, new_value[None, :], value).to(tl.float32)
    score = tl.sum(key * query.to(tl.float32)[None, :], axis=1) * scale
    score = tl.where(column <= position, score, float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=0))
    weight = weight / tl.sum(weight, axis=0)
    tl.store(out + (row * HEADS + head) * D + d, tl.sum(value * weight[:, None], axis=0).to(kind))
    # The key and value of this position, for the passes after it: by the first of the heads that share them.
    if head % (HEADS // KV_HEADS) == 0:
        here = memory + position * D + d
        tl.store(keys + here, new_key)
        tl.store(values + here, new_value)


def fast_attention(
    qkv: Tensor, table: Tensor, position: int, keys: Tensor, values: Tensor, out: Tensor | None = None
) -> Tensor:
    """`fast_attention_reference` in one launch; `out` may be given."""
    rows, kv_heads, length, d = keys.shape
    heads = qkv.shape[1] // d - 2 * kv_heads
    if out is None:
        out = torch.empty(rows, heads * d, dtype=qkv.dtype, device=qkv.device)
    ahead = supports_pdl(qkv.device)
    _fast_attention_kernel[(rows, heads)](
        qkv,
        table,
        keys,
        values,
        out,
        d**-0.5,
        position,
        HEADS=heads,
        KV_HEADS=kv_heads,
        LENGTH=length,
        PADDED=next_power_of_two(length),
        D=d,
        AHEAD=ahead,
        num_warps=1,
        launch_pdl=ahead,
    )
    return out
