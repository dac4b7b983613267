"""Attention of the fast transformer: at most a frame of keys, so rotation, memory and mixing are one launch.

The memory of a frame is [rows, kv_heads, codebooks, d].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import await_previous, kernel, next_power_of_two, runs_ahead, tl
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
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        await_previous()
    row, kv_head = tl.program_id(0), tl.program_id(1)
    kind = qkv.dtype.element_ty
    D: tl.constexpr = 2 * HALF
    MEMBERS: tl.constexpr = HEADS // KV_HEADS
    pair, column, member = tl.arange(0, HALF), tl.arange(0, PADDED), tl.arange(0, GROUP)
    source = qkv + row * (HEADS + 2 * KV_HEADS) * D
    memory = ((row * KV_HEADS + kv_head) * LENGTH) * D
    # Everything is read before anything is written: a load behind a store would wait for it.
    cos = tl.load(table + position * D + 2 * pair)
    sin = tl.load(table + position * D + 2 * pair + 1)
    mine = source + (HEADS + kv_head) * D + 2 * pair
    a, b = tl.load(mine).to(tl.float32), tl.load(mine + 1).to(tl.float32)
    value_even, value_odd = tl.load(mine + KV_HEADS * D), tl.load(mine + KV_HEADS * D + 1)
    past = (column < position)[:, None]
    place = memory + column[:, None] * D + 2 * pair[None, :]
    key_even, key_odd = tl.load(keys + place, mask=past, other=0.0), tl.load(keys + place + 1, mask=past, other=0.0)
    mix_even, mix_odd = tl.load(values + place, mask=past, other=0.0), tl.load(values + place + 1, mask=past, other=0.0)
    there = (member < MEMBERS)[:, None]
    place = source + (kv_head * MEMBERS + member)[:, None] * D + 2 * pair[None, :]
    c = tl.load(place, mask=there, other=0.0).to(tl.float32)
    d = tl.load(place + 1, mask=there, other=0.0).to(tl.float32)
    new_even, new_odd = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    query_even = (c * cos[None, :] - d * sin[None, :]).to(kind).to(tl.float32)
    query_odd = (d * cos[None, :] + c * sin[None, :]).to(kind).to(tl.float32)
    now = (column == position)[:, None]
    key_even = tl.where(now, new_even[None, :], key_even).to(tl.float32)
    key_odd = tl.where(now, new_odd[None, :], key_odd).to(tl.float32)
    mix_even = tl.where(now, value_even[None, :], mix_even).to(tl.float32)
    mix_odd = tl.where(now, value_odd[None, :], mix_odd).to(tl.float32)
    products = key_even[None, :, :] * query_even[:, None, :] + key_odd[None, :, :] * query_odd[:, None, :]
    score = tl.where((column <= position)[None, :], tl.sum(products, axis=2) * scale, float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=1)[:, None])
    weight = weight / tl.sum(weight, axis=1)[:, None]
    target = out + (row * HEADS + kv_head * MEMBERS + member)[:, None] * D + 2 * pair[None, :]
    tl.store(target, tl.sum(mix_even[None, :, :] * weight[:, :, None], axis=1).to(kind), mask=there)
    tl.store(target + 1, tl.sum(mix_odd[None, :, :] * weight[:, :, None], axis=1).to(kind), mask=there)
    # The key and value of this position, for the passes after it.
    here = memory + position * D + 2 * pair
    tl.store(keys + here, new_even)
    tl.store(keys + here + 1, new_odd)
    tl.store(values + here, value_even)
    tl.store(values + here + 1, value_odd)


def fast_attention(
    qkv: Tensor, table: Tensor, position: int, keys: Tensor, values: Tensor, out: Tensor | None = None
) -> Tensor:
    """`fast_attention_reference` in one launch; `out` may be given."""
    rows, kv_heads, length, d = keys.shape
    heads = qkv.shape[1] // d - 2 * kv_heads
    if out is None:
        out = torch.empty(rows, heads * d, dtype=qkv.dtype, device=qkv.device)
    ahead = runs_ahead(qkv.device)
    _fast_attention_kernel[(rows, kv_heads)](
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
        HALF=d // 2,
        GROUP=next_power_of_two(heads // kv_heads),
        AHEAD=ahead,
        num_warps=2,
        launch_pdl=ahead,
    )
    return out
