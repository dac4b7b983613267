"""Attention of the fast transformer. A frame has few keys, so RoPE, KV write and attention are one launch.

The KV cache of a frame is [rows, kv_heads, codebooks, d].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl
from shoal.kernels.rope import rotate, rotate_head, split_pairs


def fast_attention_reference(qkv: Tensor, table: Tensor, position: int, keys: Tensor, values: Tensor) -> Tensor:
    """Attend at one position of a frame: qkv [rows, (heads + 2 kv_heads) d] -> [rows, heads d].

    Writes the key and value of the position to the cache.
    """
    kv_heads, d = keys.shape[1], keys.shape[3]
    q, k, v = qkv.unflatten(-1, (-1, d)).split((qkv.shape[1] // d - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    angle = table[position].expand(len(qkv), -1, -1)
    keys[:, :, position] = rotate(k, angle)
    values[:, :, position] = v
    length = position + 1
    out = F.scaled_dot_product_attention(
        rotate(q, angle)[:, :, None], keys[:, :, :length], values[:, :, :length], enable_gqa=q.shape[1] != kv_heads
    )
    return out.flatten(1)


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
    PDL: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    dtype = qkv.dtype.element_ty
    d, key_position = tl.arange(0, D), tl.arange(0, PADDED)
    cos, sin = split_pairs(tl.load(table + position * D + d), D)
    if PDL:
        launch_dependents_and_wait()
    qkv_ptrs = qkv + row * (HEADS + 2 * KV_HEADS) * D + d
    cache = ((row * KV_HEADS + kv_head) * LENGTH) * D
    # All loads come before the stores: a load after a store would wait for it.
    query, new_key = tl.load(qkv_ptrs + head * D), tl.load(qkv_ptrs + (HEADS + kv_head) * D)
    new_value = tl.load(qkv_ptrs + (HEADS + KV_HEADS + kv_head) * D)
    offset, past = cache + key_position[:, None] * D + d[None, :], (key_position < position)[:, None]
    key, value = tl.load(keys + offset, mask=past, other=0.0), tl.load(values + offset, mask=past, other=0.0)
    query, new_key = rotate_head(query, cos, sin, D), rotate_head(new_key, cos, sin, D)
    current = (key_position == position)[:, None]
    key = tl.where(current, new_key[None, :], key).to(tl.float32)
    value = tl.where(current, new_value[None, :], value).to(tl.float32)
    score = tl.sum(key * query.to(tl.float32)[None, :], axis=1) * scale
    score = tl.where(key_position <= position, score, float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=0))
    weight = weight / tl.sum(weight, axis=0)
    tl.store(out + (row * HEADS + head) * D + d, tl.sum(value * weight[:, None], axis=0).to(dtype))
    # The first query head of each group writes the key and value for later positions.
    if head % (HEADS // KV_HEADS) == 0:
        new_offset = cache + position * D + d
        tl.store(keys + new_offset, new_key)
        tl.store(values + new_offset, new_value)


def fast_attention(
    qkv: Tensor, table: Tensor, position: int, keys: Tensor, values: Tensor, out: Tensor | None = None
) -> Tensor:
    """Compute `fast_attention_reference` in one launch, into `out` if given."""
    rows, kv_heads, length, d = keys.shape
    heads = qkv.shape[1] // d - 2 * kv_heads
    if out is None:
        out = torch.empty(rows, heads * d, dtype=qkv.dtype, device=qkv.device)
    pdl = supports_pdl(qkv.device)
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
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return out
