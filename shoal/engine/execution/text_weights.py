"""Attention weights over the text of a turn, read after the attention of chosen heads. Only on request."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.engine.kv_cache import PagedKV
from shoal.engine.sequence import Sequence
from shoal.kernels.cuda_graph import to_host
from shoal.kernels.text_attention import text_attention, text_attention_reference

# Widths of the result are multiples of this, so that few shapes are allocated.
WIDTH_STEP = 64


@dataclass(frozen=True, slots=True)
class TextRows:
    """Sampled rows of a step whose sequences have a text span. False if there are none."""

    rows: list[int]  # in the order of the sampled sequences
    slots: list[int]
    begins: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, sequences: Ordered[Sequence]) -> "TextRows":
        found = [(row, each.slot, *each.text) for row, each in enumerate(sequences) if each.text is not None]
        return cls(*([each[column] for each in found] for column in range(4)))

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def width(self) -> int:
        """Longest text in tokens, rounded up."""
        return -(-max(self.lengths) // WIDTH_STEP) * WIDTH_STEP

    def table(self) -> NDArray[np.int32]:
        """Return [4, texts]: row, slot, first position and length of each."""
        return np.array((self.rows, self.slots, self.begins, self.lengths), np.int32)

    def renumbered(self, rows: Ordered[int]) -> "TextRows":
        """Return the same texts with row i replaced by rows[i]."""
        return replace(self, rows=[rows[row] for row in self.rows])


@dataclass(frozen=True, slots=True)
class TextWeights:
    """Weights [texts, heads, width] of some texts; rows of `texts` count the sampled sequences of the batch."""

    texts: TextRows
    weights: Tensor

    def to_host(self) -> "TextWeights":
        """Start copying the weights to the host."""
        return replace(self, weights=to_host(self.weights))

    def by_row(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield the weights [heads, tokens] of each row, after the copy has ended."""
        weights = self.weights.numpy()
        for index, (row, length) in enumerate(zip(self.texts.rows, self.texts.lengths, strict=True)):
            yield row, weights[index, :, :length]


class WeightReader:
    """Reads the weights of chosen (layer, head) pairs, in ascending order, from the queries of a step."""

    def __init__(self, heads: Ordered[tuple[int, int]], kv: PagedKV) -> None:
        self.heads, self._kv, device = tuple(heads), kv, kv.keys.device
        self.layers = frozenset(layer for layer, _ in heads)
        grouped = groupby(self.heads, key=lambda pair: pair[0])
        self._by_layer = {layer: torch.tensor([head for _, head in pairs], device=device) for layer, pairs in grouped}

    def read(
        self, queries: Mapping[int, Tensor], tables: Tensor, texts: TextRows, *, kernel: bool = False
    ) -> TextWeights:
        """Return the weights of texts whose rows index the queries [rows, heads, d] of each layer.

        With `kernel` the fused kernel computes them instead of PyTorch operators.
        """
        compute = text_attention if kernel else text_attention_reference
        device = self._kv.keys.device
        table = torch.from_numpy(texts.table())
        table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
        out = torch.empty(len(texts.rows), len(self.heads), texts.width, device=device)
        first = 0
        for layer, heads in self._by_layer.items():
            part = out[:, first : first + len(heads)]
            scales = self._kv.scales(layer)["key_scales"]
            compute(queries[layer], self._kv.keys[layer], tables, table, heads, part, key_scales=scales)
            first += len(heads)
        return TextWeights(texts, out)
