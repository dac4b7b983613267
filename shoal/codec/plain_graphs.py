"""Streaming codec decoder on PyTorch operators: the plain codec at fixed sizes, captured as CUDA graphs.

Runs on every GPU and with a quantized codec, in the precision of its weights. `SlotPast` keeps positions and lengths on
the device, so `Codec.decode_from` is captured as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shoal.codec.config import MAX_POSITIONS
from shoal.codec.graph_decoder import FrameSpan, GraphDecoder, ResetCall
from shoal.codec.layers import WindowTransformer
from shoal.codec.streaming import SlotPast
from shoal.kernels.cuda_graph import CapturedGraph, GraphSizes

if TYPE_CHECKING:
    from shoal.codec.dac import Codec

# Sizes of the captured calls: frames per stream, and streams. MAX_CALL_FRAMES limits their product, and so the memory.
FRAMES = (2, 8, 32)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_CALL_FRAMES = 256

Size = tuple[int, int]  # frames per stream, streams


class PlainCall:
    """Workload that decodes up to `frames` frames of `rows` streams. Inputs [rows, 2 + codebooks x frames].

    Each row is a slot, its number of valid frames, and its codes.
    """

    def __init__(self, codec: Codec, past: SlotPast, size: Size) -> None:
        self._codec, self._past = codec, past
        self.frames, rows = size
        self._spare = len(past.frames_seen) - 1
        width = 2 + codec.config.num_codebooks * self.frames
        self.inputs = torch.zeros(rows, width, dtype=torch.int32, device=codec.device)
        self.samples = torch.zeros(rows, self.frames * codec.config.frame_length, device=codec.device)

    def padding(self) -> np.ndarray:
        """Return inputs in which no stream has a valid frame."""
        inputs = np.zeros(self.inputs.shape, np.int32)
        inputs[:, 0] = self._spare
        return inputs

    def run(self) -> None:
        inputs = self.inputs.long()
        self._past.open(inputs[:, 0], self.frames, inputs[:, 1])
        codes = inputs[:, 2:].unflatten(1, (-1, self.frames))
        self.samples.copy_(self._codec.decode_from(codes, self._past))
        self._past.close()


class PlainGraphDecoder(GraphDecoder[Size, PlainCall]):
    """Streaming decoder on graphs of the plain codec. Raises RuntimeError if no size works."""

    backend = "plain-graph"

    def __init__(self, codec: Codec, slots: int, *, capture: bool) -> None:
        super().__init__(codec, slots)
        codec.reserve(MAX_POSITIONS)
        # Kept alive for the graphs, which read them: a longer stream of another decoder replaces them in the codec.
        self._tables = [module.table for module in codec.modules() if isinstance(module, WindowTransformer)]
        self.past = SlotPast(slots + 1, codec.device)
        largest = min(rows for rows in ROWS if rows >= min(slots, ROWS[-1]))
        sizes = [(frames, rows) for frames, rows in product(FRAMES, ROWS) if rows <= largest]
        sizes = [size for size in sizes if size[0] * size[1] <= MAX_CALL_FRAMES]
        self._calls = GraphSizes("plain codec graph", {size: PlainCall(codec, self.past, size) for size in sizes})
        self._reset = CapturedGraph(ResetCall(self.past, slots, codec.device))
        if capture:
            self._capture()

    def _split(self, lengths: Sequence[int]) -> Iterator[list[FrameSpan]]:
        """Split long rows into spans that a call holds, then group spans of similar length into calls."""
        longest = max(frames for frames, _ in self._calls)
        for start in range(0, max(lengths, default=0), longest):
            spans = [FrameSpan(row, start, min(longest, length - start)) for row, length in enumerate(lengths)]
            spans = sorted((span for span in spans if span.frames > 0), key=lambda span: span.frames)
            while spans:
                _, count = self._next_call(spans)
                yield spans[:count]
                spans = spans[count:]

    def _next_call(self, spans: list[FrameSpan]) -> tuple[Size, int]:
        """Return the size that decodes the first of these spans, shortest first, and how many of them it holds."""
        frames = min(frames for frames, _ in self._calls if frames >= spans[0].frames)
        fitting = sum(span.frames <= frames for span in spans)
        rows = [rows for each, rows in self._calls if each == frames]
        chosen = next((each for each in rows if each >= fitting), max(rows))
        return (frames, chosen), min(fitting, chosen)

    def _launch(self, codes: np.ndarray, slots: Sequence[int], spans: list[FrameSpan]) -> Tensor:
        size, _ = self._next_call(spans)
        inputs = self._calls[size].workload.padding()
        for row, span in enumerate(spans):
            inputs[row, :2] = slots[span.row], span.frames
            piece = codes[span.row, :, span.start : span.start + span.frames]
            inputs[row, 2:].reshape(-1, size[0])[:, : span.frames] = piece
        return self._calls.run(size, inputs).samples[: len(spans)]
