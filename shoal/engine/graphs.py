"""The fast rung: live voices decode through fused frames of a few fixed sizes, each captured once as a CUDA graph.

A batch takes the smallest size that holds it; rows it does not fill work on the spare slot and the spare block, where
nothing is ever read. Prompts have any shape, so they go through the plain runner.
"""

from collections.abc import Sequence as Ordered

import numpy as np
import torch

from shoal.engine.fused import FusedFrame
from shoal.engine.runner import Runner
from shoal.engine.scheduler import Batch, Drawn
from shoal.engine.sequence import Sequence
from shoal.kernels.jit import usable
from shoal.model.dual_ar import DualAR
from shoal.model.linear import Int4Linear, Int8Linear
from shoal.model.slow import Head

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


def supported(model: DualAR) -> bool:
    """Whether the fused frame can run this model: kernels for its device, and weights that are not quantised."""
    quantised = any(isinstance(each, Int8Linear | Int4Linear) for each in model.modules())
    return usable(model.device) and not quantised


class FusedRunner:
    """The interface of `Runner`. Without `capture` the frames run launch by launch, on any device the kernels know."""

    def __init__(self, plain: Runner, head: Head, buckets: Ordered[int], *, capture: bool) -> None:
        self.plain = plain
        self._spare_slot = plain.slots.spare
        self._spare_place = plain.kv.spare * plain.size
        self._width = plain.tables.shape[1]
        self._frames: dict[int, FusedFrame] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        most = len(plain.tables)
        # The largest first: the smaller ones then find all the memory they need in the pool it leaves.
        for rows in sorted({min(bucket, most) for bucket in buckets} | {most}, reverse=True):
            self._frames[rows] = FusedFrame(plain.model, head, plain.kv, plain.slots, rows, self._width)
            if capture:
                self._capture(rows)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Drawn:
        drawn = []
        if batch.prefills:
            drawn.append(self.plain.run(Batch(batch.prefills)).columns)
        if batch.decodes:
            drawn.append(self._decode(batch.decodes))
        drawn = [columns for columns in drawn if len(columns)]
        return Drawn(batch, np.concatenate(drawn)) if drawn else Drawn.nothing(batch)

    def _decode(self, sequences: list[Sequence]) -> np.ndarray:
        rows = next(size for size in sorted(self._frames) if size >= len(sequences))
        frame = self._frames[rows]
        frame.fill(self._inputs(sequences, rows))
        if rows in self._graphs:
            self._graphs[rows].replay()
        else:
            frame.run()
        # The one place where the host waits for the device.
        return frame.columns[: len(sequences)].cpu().numpy().astype(np.int32)

    def _inputs(self, sequences: list[Sequence], rows: int) -> np.ndarray:
        """Slots, positions, places, lengths [4, rows] and tables [rows, width], as one array of int32."""
        size, tables = self.plain.size, self.plain.tables
        live = len(sequences)
        head = np.zeros((4, rows), np.int32)
        head[0], head[2], head[3] = self._spare_slot, self._spare_place, 1
        # Typed: a capture has no sequences, and nothing is indexed by floats, not even by none of them.
        slots = np.array([sequence.slot for sequence in sequences], np.int64)
        lengths = np.array([sequence.computed for sequence in sequences], np.int64)
        positions = lengths - 1
        head[:, :live] = slots, positions, tables[slots, positions // size] * size + positions % size, lengths
        table = np.full((rows, self._width), self.plain.kv.spare, np.int32)
        table[:live] = tables[slots]
        return np.concatenate((head.reshape(-1), table.reshape(-1)))

    def _capture(self, rows: int) -> None:
        frame = self._frames[rows]
        frame.fill(self._inputs([], rows))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.inference_mode():
            # Compiles the kernels, and fills the allocator, before anything is recorded.
            frame.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.inference_mode(), torch.cuda.graph(graph, pool=pool):
            frame.run()
        self._graphs[rows] = graph
