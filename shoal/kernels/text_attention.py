"""Attention weights of chosen heads over the text of a turn, for word times.

Reads queries and cached keys after a step; attention itself is not changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.dequant import dequantize
from shoal.kernels.jit import kernel, tl
from shoal.kernels.kv_quant import dequantize_kv

BLOCK_N = 64


def text_attention_reference(
    q: Tensor,
    keys: Tensor,
    tables: Tensor,
    texts: Tensor,
    heads: Tensor,
    out: Tensor,
    *,
    key_scales: Tensor | None = None,
) -> None:
    """Write the weights of `heads` [h] of one layer to out [m, h, width], which is zero after the length of a text.

    texts [4, m] holds, for each text, the row of q [n, heads, d] that attends to it, its slot, the position of its
    first token and its length. The weights of a text add up to one. `tables` are the block tables [slots, blocks] of
    keys [blocks, block_size, kv_heads, d].
    """
    rows, slots, begins, lengths = texts.long()
    size, kv_heads = keys.shape[1:3]
    offsets = torch.arange(out.shape[2], device=q.device)
    visible = offsets < lengths[:, None]
    positions = torch.where(visible, begins[:, None] + offsets, begins[:, None])
    blocks = tables[slots[:, None], positions // size].long()
    group = q.shape[1] // kv_heads
    k = keys[blocks, positions % size][:, :, heads // group]  # [m, width, h, d]
    if key_scales is not None:
        k = dequantize_kv(k, key_scales[blocks, positions % size][:, :, heads // group], torch.float32)
    scores = torch.einsum("mhd,mwhd->mhw", q[rows][:, heads].float(), k.float()) * q.shape[2] ** -0.5
    out.copy_(scores.masked_fill_(~visible[:, None], -torch.inf).softmax(-1))


@kernel("count", "width", "row_stride")
def _text_attention_kernel(
    q,
    keys,
    key_scales,
    tables,
    texts,
    heads,
    out,
    count,
    width,
    row_stride,
    scale,
    QUANTIZED: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    number, text = tl.program_id(0), tl.program_id(1)
    row, slot = tl.load(texts + text), tl.load(texts + count + text)
    begin, length = tl.load(texts + 2 * count + text), tl.load(texts + 3 * count + text)
    head = tl.load(heads + number)
    table = tables + slot * TABLE_WIDTH
    target = out + text * row_stride + number * width
    d = tl.arange(0, D)
    query = tl.load(q + (row * HEADS + head) * D + d)
    top, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, length, BLOCK_N):
        offset = start + tl.arange(0, BLOCK_N)
        visible = offset < length
        position = begin + offset
        block = tl.load(table + position // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
        at = (block * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + head // (HEADS // KV_HEADS)
        key = tl.load(keys + at[:, None] * D + d[None, :], mask=visible[:, None], other=0.0)
        if QUANTIZED:
            key = dequantize(key, query.dtype)
        score = tl.sum(key.to(tl.float32) * query.to(tl.float32)[None, :], axis=1) * scale
        if QUANTIZED:
            score *= tl.load(key_scales + at, mask=visible, other=0.0).to(tl.float32)
        score = tl.where(visible, score, float("-inf"))
        tl.store(target + offset, score, mask=offset < width)
        new_top = tl.maximum(top, tl.max(score, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(score - new_top), axis=0)
        top = new_top
    # The scores of this program, which other threads of it may have stored.
    tl.debug_barrier()
    for start in range(0, width, BLOCK_N):
        offset = start + tl.arange(0, BLOCK_N)
        score = tl.load(target + offset, mask=offset < length, other=float("-inf"))
        tl.store(target + offset, tl.exp(score - top) / total, mask=offset < width)


def text_attention(
    q: Tensor,
    keys: Tensor,
    tables: Tensor,
    texts: Tensor,
    heads: Tensor,
    out: Tensor,
    *,
    key_scales: Tensor | None = None,
) -> None:
    """The GPU counterpart of `text_attention_reference`: one program per text and head."""
    block_size, kv_heads = keys.shape[1:3]
    _text_attention_kernel[(len(heads), texts.shape[1])](
        q,
        keys,
        keys if key_scales is None else key_scales,
        tables,
        texts,
        heads,
        out,
        texts.shape[1],
        out.shape[2],
        out.stride(0),
        q.shape[2] ** -0.5,
        QUANTIZED=key_scales is not None,
        TABLE_WIDTH=tables.shape[1],
        BLOCK_SIZE=block_size,
        HEADS=q.shape[1],
        KV_HEADS=kv_heads,
        D=q.shape[2],
        BLOCK_N=BLOCK_N,
        num_warps=4,
    )
