"""Attention of the fast transformer: at most a frame of keys, so rotation, memory and mixing are one launch.

The memory of a frame is [rows, kv_heads, codebooks, d].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import jit, next_power_of_two, tl
from shoal.kernels.rope import rotate


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


@jit
def _fast_attention_kernel(
    qkv,
    table,
    keys,
    values,
    out,
    scale,
    POSITION: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LENGTH: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
):
    row, kv_head = tl.program_id(0), tl.program_id(1)
    kind = qkv.dtype.element_ty
    D: tl.constexpr = 2 * HALF
    pair = tl.arange(0, HALF)
    source = qkv + row * (HEADS + 2 * KV_HEADS) * D
    cos = tl.load(table + POSITION * D + 2 * pair)
    sin = tl.load(table + POSITION * D + 2 * pair + 1)
    # The key and value of this position, for this pass and those after it.
    mine = source + (HEADS + kv_head) * D
    a, b = tl.load(mine + 2 * pair).to(tl.float32), tl.load(mine + 2 * pair + 1).to(tl.float32)
    new_even, new_odd = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    mine = source + (HEADS + KV_HEADS + kv_head) * D
    value_even, value_odd = tl.load(mine + 2 * pair), tl.load(mine + 2 * pair + 1)
    memory = ((row * KV_HEADS + kv_head) * LENGTH) * D
    here = memory + POSITION * D
    tl.store(keys + here + 2 * pair, new_even)
    tl.store(keys + here + 2 * pair + 1, new_odd)
    tl.store(values + here + 2 * pair, value_even)
    tl.store(values + here + 2 * pair + 1, value_odd)
    column = tl.arange(0, PADDED)
    past = column[:, None] < POSITION
    place = memory + column[:, None] * D + 2 * pair[None, :]
    now = column[:, None] == POSITION
    key_even = tl.where(now, new_even[None, :], tl.load(keys + place, mask=past, other=0.0)).to(tl.float32)
    key_odd = tl.where(now, new_odd[None, :], tl.load(keys + place + 1, mask=past, other=0.0)).to(tl.float32)
    mix_even = tl.where(now, value_even[None, :], tl.load(values + place, mask=past, other=0.0)).to(tl.float32)
    mix_odd = tl.where(now, value_odd[None, :], tl.load(values + place + 1, mask=past, other=0.0)).to(tl.float32)
    for member in tl.static_range(HEADS // KV_HEADS):
        head = kv_head * (HEADS // KV_HEADS) + member
        mine = source + head * D
        a, b = tl.load(mine + 2 * pair).to(tl.float32), tl.load(mine + 2 * pair + 1).to(tl.float32)
        query_even = (a * cos - b * sin).to(kind).to(tl.float32)
        query_odd = (b * cos + a * sin).to(kind).to(tl.float32)
        score = tl.sum(key_even * query_even[None, :] + key_odd * query_odd[None, :], axis=1) * scale
        score = tl.where(column <= POSITION, score, float("-inf"))
        weight = tl.exp(score - tl.max(score, axis=0))
        weight = weight / tl.sum(weight, axis=0)
        target = out + (row * HEADS + head) * D
        tl.store(target + 2 * pair, tl.sum(mix_even * weight[:, None], axis=0).to(kind))
        tl.store(target + 2 * pair + 1, tl.sum(mix_odd * weight[:, None], axis=0).to(kind))


def fast_attention(qkv: Tensor, table: Tensor, position: int, keys: Tensor, values: Tensor) -> Tensor:
    """`fast_attention_reference` in one launch."""
    rows, kv_heads, length, d = keys.shape
    heads = qkv.shape[1] // d - 2 * kv_heads
    out = torch.empty(rows, heads * d, dtype=qkv.dtype, device=qkv.device)
    _fast_attention_kernel[(rows, kv_heads)](
        qkv,
        table,
        keys,
        values,
        out,
        d**-0.5,
        POSITION=position,
        HEADS=heads,
        KV_HEADS=kv_heads,
        LENGTH=length,
        PADDED=next_power_of_two(length),
        HALF=d // 2,
        num_warps=2,
    )
    return out
