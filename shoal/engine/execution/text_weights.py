"""Attention weights over the text of a turn, read after the attention of chosen heads. Only on request."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.engine.execution.text_rows import TextRows
from shoal.engine.kv_cache import PagedKV
from shoal.kernels.cuda_graph import to_host
from shoal.kernels.text_attention import text_attention, text_attention_reference


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
