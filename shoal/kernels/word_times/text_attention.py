"""Attention weights of chosen heads over the text of a turn, for word times.

Reads queries and cached keys after a step; attention itself is not changed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.kernels.attention.kv_quant import dequantize_kv
from shoal.kernels.dequant import dequantize
from shoal.kernels.jit import kernel, tl

BLOCK_N = 64


class Texts(NamedTuple):
    """Texts of the rows of a batch, int32 [rows] each."""

    slots: Tensor
    begins: Tensor  # position of the first token
    lengths: Tensor  # tokens; 0: the row has no text


def text_attention_reference(
    q: Tensor,
    keys: Tensor,
    tables: Tensor,
    texts: Texts,
    heads: Tensor,
    out: Tensor,
    *,
    key_scales: Tensor | None = None,
) -> None:
    """Write the weights of `heads` [h] of one layer to out [n, h, width], for each row of q [n, heads, d].

    `texts` are the texts that the rows attend to. The weights of a text add up to one; entries after it are undefined,
    and so are rows without a text. `tables` are the block tables [slots, blocks] of keys [blocks, block_size, kv_heads,
    d].
    """
    slots, begins, lengths = (each.long() for each in texts)
    size, kv_heads = keys.shape[1:3]
    offsets = torch.arange(out.shape[2], device=q.device)
    visible = offsets < lengths[:, None]
    positions = torch.where(visible, begins[:, None] + offsets, begins[:, None])
    blocks = tables[slots[:, None], positions // size].long()
    group = q.shape[1] // kv_heads
    k = keys[blocks, positions % size][:, :, heads // group]  # [m, width, h, d]
    if key_scales is not None:
        k = dequantize_kv(k, key_scales[blocks, positions % size][:, :, heads // group], torch.float32)
    scores = torch.einsum("mhd,mwhd->mhw", q[:, heads].float(), k.float()) * q.shape[2] ** -0.5
    out.copy_(scores.masked_fill_(~visible[:, None], -torch.inf).softmax(-1))


@kernel("width", "row_stride")
def _text_attention_kernel(
    q,
    keys,
    key_scales,
    tables,
    slots,
    begins,
    lengths,
    heads,
    out,
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
    number, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if length == 0:
        return
    begin, head = tl.load(begins + row), tl.load(heads + number)
    table = tables + tl.load(slots + row) * TABLE_WIDTH
    target = out + row * row_stride + number * width
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
        tl.store(target + offset, score, mask=visible)
        new_top = tl.maximum(top, tl.max(score, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(score - new_top), axis=0)
        top = new_top
    # A thread reads scores that other threads of this program have stored.
    tl.debug_barrier()
    for start in range(0, length, BLOCK_N):
        offset = start + tl.arange(0, BLOCK_N)
        score = tl.load(target + offset, mask=offset < length, other=float("-inf"))
        tl.store(target + offset, tl.exp(score - top) / total, mask=offset < length)


def text_attention(
    q: Tensor,
    keys: Tensor,
    tables: Tensor,
    texts: Texts,
    heads: Tensor,
    out: Tensor,
    *,
    key_scales: Tensor | None = None,
) -> None:
    """Compute `text_attention_reference` in one launch: one program per text and head."""
    block_size, kv_heads = keys.shape[1:3]
    _text_attention_kernel[(len(heads), len(q))](
        q,
        keys,
        keys if key_scales is None else key_scales,
        tables,
        *texts,
        heads,
        out,
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
