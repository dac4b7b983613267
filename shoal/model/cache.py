"""KV caches for batches of equally long rows: reference generation, the fast transformer and training."""

from copy import copy

import torch
from torch import Tensor

from shoal.kernels.attention.grouped_attention import grouped_attention
from shoal.model.config import BlockConfig


class DenseKVCache:
    """Contiguous KV cache of `rows` sequences that advance together by the same number of tokens per call."""

    def __init__(self, config: BlockConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.n_layer, rows, config.n_local_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.rows = rows
        self.filled = 0
        self.last_layer = config.n_layer - 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (by_row(x, self.rows) for x in (q, k, v))
        begin, end = self.filled, self.filled + q.shape[-2]
        self.keys[layer][:, :, begin:end] = k
        self.values[layer][:, :, begin:end] = v
        if layer == self.last_layer:
            self.filled = end
        return attend(q, self.keys[layer][:, :, :end], self.values[layer][:, :, :end])

    def first_rows(self, rows: int) -> "DenseKVCache":
        """Return an empty cache of `rows` rows in the memory of this one. Stale entries are overwritten before use."""
        part = copy(self)
        part.keys, part.values, part.rows, part.filled = self.keys[:, :rows], self.values[:, :rows], rows, 0
        return part


class NoKVCache:
    """Causal attention over complete rows without stored keys, for teacher-forced passes."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(*(by_row(x, self.rows) for x in (q, k, v)))


def by_row(x: Tensor, rows: int) -> Tensor:
    """Reshape [rows * T, heads, d] -> [rows, heads, T, d]."""
    return x.unflatten(0, (rows, -1)).transpose(1, 2)


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend causally with q [rows, heads, T, d], the last T of S tokens, over keys and values [rows, kv_heads, S, d].

    Returns [rows * T, heads, d].
    """
    new, seen = q.shape[-2], keys.shape[-2]
    mask = None if new == 1 else causal_mask(new, seen, q.device)
    return grouped_attention(q, keys, values, mask).transpose(1, 2).flatten(0, 1)


def causal_mask(new: int, seen: int, device: torch.device) -> Tensor:
    """Return the boolean mask [new, seen] of the tokens that each of the last `new` of `seen` tokens may attend to."""
    return torch.ones(new, seen, dtype=torch.bool, device=device).tril(seen - new)
