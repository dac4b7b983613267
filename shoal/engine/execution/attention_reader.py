"""Read the attention of chosen heads over the text of a turn after each step, for requests with timestamps.

Word times need the path through the text, which stays on the device: `PathReader`. Calibration needs the weights
themselves: `WeightReader`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.engine.execution.slot_state import SlotStates
from shoal.engine.execution.text_rows import TextRows
from shoal.engine.kv_cache import PagedKV
from shoal.kernels.cuda_graph import to_host
from shoal.kernels.word_times.text_attention import Texts, text_attention, text_attention_reference
from shoal.kernels.word_times.text_path import BLOCK_N, TILES, text_path, text_path_reference
from shoal.kernels.word_times.text_path_numpy import KEPT_FRAMES, MAX_TOKENS

Queries = Mapping[int, Tensor]  # [rows, heads, d] by layer


@dataclass(frozen=True, slots=True)
class PendingAttention(ABC):
    """Results of some rows, whose copy to the host may still be in flight."""

    texts: TextRows
    results: Tensor

    @abstractmethod
    def by_row(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield row and result of each row that has a text. The copy must have ended."""


class PendingWeights(PendingAttention):
    """Weights [rows, heads, width]."""

    def by_row(self) -> Iterator[tuple[int, NDArray[Any]]]:
        weights, texts = self.results.numpy(), self.texts
        return ((texts.rows[index], weights[index, :, : texts.lengths[index]]) for index in texts.with_text)


class PendingOrigins(PendingAttention):
    """Origins of the path in tiles [tiles, rows, 64]."""

    def by_row(self) -> Iterator[tuple[int, NDArray[Any]]]:
        with_text = self.texts.with_text
        # `concatenate` copies, so the pinned memory is free for another step.
        origins = np.concatenate(self.results.numpy(), axis=1)[with_text]
        return zip([self.texts.rows[index] for index in with_text], origins, strict=True)


class AttentionReader(ABC):
    """Reads the attention of chosen (layer, head) pairs, in ascending order, from the queries of a step."""

    capturable = True  # whether `launch` allocates nothing and may be captured as a graph

    def __init__(self, heads: Ordered[tuple[int, int]], kv: PagedKV) -> None:
        self.heads, self._kv, self._device = tuple(heads), kv, kv.keys.device
        self.layers = frozenset(layer for layer, _ in heads)
        grouped = groupby(self.heads, key=lambda pair: pair[0])
        self._by_layer = {layer: torch.tensor([head for _, head in pairs]) for layer, pairs in grouped}
        self._by_layer = {layer: each.to(self._device) for layer, each in self._by_layer.items()}

    @abstractmethod
    def read(self, queries: Queries, tables: Tensor, texts: TextRows) -> PendingAttention:
        """Compute with PyTorch operators, after the frames of these rows are sampled, and start copying to the host."""

    @abstractmethod
    def launch(self, queries: Queries, tables: Tensor, texts: Texts) -> Tensor:
        """Launch the kernels over all rows and return their result on the device; the next launch may overwrite it."""

    @abstractmethod
    def start_copy(self, result: Tensor, texts: TextRows) -> PendingAttention:
        """Start copying the result of a launch to the host."""

    def _attend(self, queries: Queries, tables: Tensor, texts: Texts, out: Tensor, *, kernel: bool) -> None:
        """Write the weights of all heads to out [rows, heads, width]."""
        compute, first = text_attention if kernel else text_attention_reference, 0
        for layer, heads in self._by_layer.items():
            part, scales = out[:, first : first + len(heads)], self._kv.scales(layer)["key_scales"]
            compute(queries[layer], self._kv.keys[layer], tables, texts, heads, part, key_scales=scales)
            first += len(heads)

    def _upload(self, texts: TextRows) -> Texts:
        table = torch.from_numpy(np.array((texts.slots, texts.begins, texts.lengths), np.int32))
        if self._device.type != "cuda":
            return Texts(*table.to(self._device))
        return Texts(*table.pin_memory().to(self._device, non_blocking=True))


class WeightReader(AttentionReader):
    """Returns the weights of every head."""

    capturable = False

    def read(self, queries: Queries, tables: Tensor, texts: TextRows) -> PendingAttention:
        out = torch.empty(len(texts.slots), len(self.heads), texts.width, device=self._device)
        self._attend(queries, tables, self._upload(texts), out, kernel=False)
        return self.start_copy(out, texts)

    def launch(self, queries: Queries, tables: Tensor, texts: Texts) -> Tensor:
        out = torch.empty(len(texts.slots), len(self.heads), MAX_TOKENS, device=self._device)
        self._attend(queries, tables, texts, out, kernel=True)
        return out

    def start_copy(self, result: Tensor, texts: TextRows) -> PendingAttention:
        return PendingWeights(texts, to_host(result[: len(texts.slots), :, : texts.width]))


class PathReader(AttentionReader):
    """Extends the path through the text of every slot, from the mean over the heads. Its scores stay on the device."""

    def __init__(self, heads: Ordered[tuple[int, int]], kv: PagedKV, states: SlotStates) -> None:
        super().__init__(heads, kv)
        rows = states.spare + 1 if heads else 0
        self.scores = torch.zeros(rows, KEPT_FRAMES, MAX_TOKENS, dtype=torch.int32, device=self._device)
        self._frames = states.state.frame
        # Allocated once: graphs contain their addresses.
        self._weights = torch.zeros(rows * len(heads) * MAX_TOKENS, device=self._device)
        self._origins = torch.zeros(TILES * rows * BLOCK_N, dtype=torch.int16, device=self._device)

    def read(self, queries: Queries, tables: Tensor, texts: TextRows) -> PendingAttention:
        rows, table = len(texts.slots), self._upload(texts)
        weights = torch.empty(rows, len(self.heads), texts.width, device=self._device)
        self._attend(queries, tables, table, weights, kernel=False)
        out = torch.empty(_tiles(texts), rows, BLOCK_N, dtype=torch.int16, device=self._device)
        text_path_reference(weights, table, self._frames, self.scores, out)
        return self.start_copy(out, texts)

    def launch(self, queries: Queries, tables: Tensor, texts: Texts) -> Tensor:
        rows = len(texts.slots)
        weights = self._weights[: rows * len(self.heads) * MAX_TOKENS].view(rows, len(self.heads), MAX_TOKENS)
        out = self._origins[: TILES * rows * BLOCK_N].view(TILES, rows, BLOCK_N)
        self._attend(queries, tables, texts, weights, kernel=True)
        text_path(weights, texts, self._frames, self.scores, out)
        return out

    def start_copy(self, result: Tensor, texts: TextRows) -> PendingAttention:
        return PendingOrigins(texts, to_host(result[: _tiles(texts)]))


def _tiles(texts: TextRows) -> int:
    """Return the number of tiles that hold the end of the path and the origins of the longest text."""
    return max(texts.lengths) // BLOCK_N + 1
