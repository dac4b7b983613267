"""Attention over keys and values that lie in blocks.

Memory is [blocks, size, kv_heads, d]; a table names the blocks of one sequence in order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import jit, next_power_of_two, tl


def paged_decode_reference(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    """One new token per sequence: q [n, heads, d], tables [n, blocks] -> [n, heads, d]; lengths [n] count it."""
    k, v = (_gather(memory, tables) for memory in (keys, values))
    visible = torch.arange(k.shape[-2], device=q.device) < lengths[:, None]
    mixed = F.scaled_dot_product_attention(
        q[:, :, None], k, v, attn_mask=visible[:, None, None], enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed.squeeze(-2)


def paged_prefill_reference(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, end: int) -> Tensor:
    """The last columns of one sequence: q [T, heads, d] up to position end - 1, table [blocks] -> [T, heads, d]"""
    k, v = (_gather(memory, table[None])[:, :, :end] for memory in (keys, values))
    mask = torch.ones(len(q), end, dtype=torch.bool, device=q.device).tril(end - len(q))
    q = q.transpose(0, 1)[None]
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return mixed[0].transpose(0, 1)


def _gather(memory: Tensor, tables: Tensor) -> Tensor:
    """[n, blocks] of block numbers -> [n, kv_heads, blocks * size, d]"""
    return memory[tables].flatten(1, 2).transpose(1, 2)


@jit
def _decode_kernel(
    q,
    keys,
    values,
    tables,
    lengths,
    parts,
    sums,
    tops,
    scale,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    begin = split * SPLIT
    if begin < length:
        member = tl.arange(0, GROUP)
        d = tl.arange(0, D)
        mine = member < HEADS // KV_HEADS
        head = kv_head * (HEADS // KV_HEADS) + member
        query = tl.load(q + (row * HEADS + head[:, None]) * D + d[None, :], mask=mine[:, None], other=0.0)
        top = tl.full((GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        mix = tl.zeros((GROUP, D), tl.float32)
        end = tl.minimum(length, begin + SPLIT)
        for start in range(begin, end, STEP):
            column = start + tl.arange(0, STEP)
            seen = column < end
            block = tl.load(tables + row * WIDTH + column // SIZE, mask=seen, other=0).to(tl.int64)
            place = ((block * SIZE + column % SIZE) * KV_HEADS + kv_head) * D
            key = tl.load(keys + place[:, None] + d[None, :], mask=seen[:, None], other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            score = tl.where(seen[None, :], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, axis=1))
            weight = tl.exp(score - higher[:, None])
            shrink = tl.exp(top - higher)
            value = tl.load(values + place[:, None] + d[None, :], mask=seen[:, None], other=0.0)
            mix = tl.dot(weight.to(value.dtype), value, mix * shrink[:, None], input_precision="ieee")
            total = total * shrink + tl.sum(weight, axis=1)
            top = higher
        part = (row * HEADS + head) * SPLITS + split
        tl.store(parts + part[:, None] * D + d[None, :], mix / total[:, None], mask=mine[:, None])
        tl.store(sums + part, total, mask=mine)
        tl.store(tops + part, top, mask=mine)


@jit
def _combine_kernel(
    parts,
    sums,
    tops,
    lengths,
    out,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    split = tl.arange(0, PADDED)
    used = split * SPLIT < tl.load(lengths + row)
    part = (row * HEADS + head) * SPLITS + split
    top = tl.load(tops + part, mask=used, other=float("-inf"))
    weight = tl.load(sums + part, mask=used, other=0.0) * tl.exp(top - tl.max(top, axis=0))
    d = tl.arange(0, D)
    mix = tl.load(parts + part[:, None] * D + d[None, :], mask=used[:, None], other=0.0)
    mixed = tl.sum(mix * (weight / tl.sum(weight, axis=0))[:, None], axis=0)
    tl.store(out + (row * HEADS + head) * D + d, mixed.to(out.dtype.element_ty))


def paged_decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, *, split: int = 512
) -> Tensor:
    """`paged_decode_reference` on a GPU, long contexts cut into pieces of `split` columns that run side by side.

    Pieces are of fixed length, not of fixed number, so a row's result does not depend on who is in the batch.
    """
    rows, heads, d = q.shape
    size, kv_heads = keys.shape[1:3]
    splits = -(-tables.shape[1] * size // split)
    parts = torch.empty(rows, heads, splits, d, dtype=torch.float32, device=q.device)
    sums = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    tops = torch.empty_like(sums)
    _decode_kernel[(rows, kv_heads, splits)](
        q,
        keys,
        values,
        tables,
        lengths,
        parts,
        sums,
        tops,
        d**-0.5,
        WIDTH=tables.shape[1],
        SIZE=size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        SPLIT=split,
        SPLITS=splits,
        GROUP=max(16, next_power_of_two(heads // kv_heads)),
        STEP=min(64, split),
        num_warps=4,
        num_stages=2,
    )
    out = torch.empty_like(q)
    _combine_kernel[(rows, heads)](
        parts,
        sums,
        tops,
        lengths,
        out,
        HEADS=heads,
        D=d,
        SPLIT=split,
        SPLITS=splits,
        PADDED=next_power_of_two(splits),
        num_warps=1,
    )
    return out
