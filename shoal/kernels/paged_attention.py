"""Attention over keys and values that lie in blocks.

Memory is [blocks, size, kv_heads, d]; a table names the blocks of one sequence in order.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


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
