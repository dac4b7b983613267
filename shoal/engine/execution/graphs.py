"""The fast rung: fused tokens and frames of a few fixed sizes, each captured once as a CUDA graph.

A batch takes the smallest size that holds it; rows it does not fill work on the spare slot and the spare block, where
nothing is ever read. A prompt is computed up to its last token, which then draws its frame like any newest token:
the first frame of a voice goes through the same graph as all others.
"""

from collections.abc import Sequence as Ordered
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from shoal.config import EngineConfig
from shoal.engine.execution.fused import FusedFrame, FusedPrefill
from shoal.engine.execution.runner import EagerRunner, PendingStep
from shoal.engine.scheduler import Batch, Prefill
from shoal.kernels.cuda_graph import CapturedGraph, HostBuffer, compile_ahead
from shoal.kernels.jit import kernels_available
from shoal.model.dual_ar import DualAR
from shoal.model.linear import has_fused_kernels
from shoal.model.slow import Head

PROMPTS = (32, 64, 96, 128, 192, 256, 384, 512)


def supported(model: DualAR) -> bool:
    """Whether the fused frame can run this model: kernels for its device, and for the kind of its weights."""
    return kernels_available(model.device) and all(has_fused_kernels(module) for module in model.modules())


class FusedRunner:
    """Launches steps. Without `capture` they run launch by launch, on any device the kernels know."""

    def __init__(
        self,
        eager: EagerRunner,
        head: Head,
        *,
        capture: bool,
        buckets: Ordered[int] = EngineConfig.buckets,
        prompts: Ordered[int] = PROMPTS,
    ) -> None:
        self.eager = eager
        device, slots = eager.model.device, len(eager.tables)
        shape = (slots + 1, eager.tables.shape[1])
        self._tables = HostBuffer(torch.full(shape, eager.kv.spare, dtype=torch.int32, device=device))
        self._padded = np.full(shape, eager.kv.spare, np.int32)
        model, kv, tables = eager.model, eager.kv, self._tables.target
        sizes = {min(bucket, slots) for bucket in buckets} | {slots}
        self._frames = {
            rows: CapturedGraph(FusedFrame(model, head, kv, eager.slots, tables, rows)) for rows in sorted(sizes)
        }
        self._prompts = {rows: CapturedGraph(FusedPrefill(model, kv, tables, rows)) for rows in sorted(prompts)}
        if capture:
            self._capture()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        self._padded[:-1] = self.eager.tables
        self._tables.upload(self._padded)
        drawing = [prefill for prefill in batch.prefills if prefill.samples_frame]
        self.eager.slots.bind([prefill.sequence for prefill in drawing])
        self._launch_prompts([replace(each, end=each.end - each.samples_frame) for each in batch.prefills])
        sequences = [sequence for sequence, _ in batch.sampled()]
        if not sequences:
            return PendingStep(batch)
        rows = next(size for size in self._frames if size >= len(sequences))
        inputs = self._spare_rows(rows, 2)
        inputs[0, : len(sequences)] = [sequence.slot for sequence in sequences]
        inputs[1, : len(sequences)] = [sequence.computed - 1 for sequence in sequences]
        self._frames[rows].run(inputs)
        return PendingStep.of(batch, self._frames[rows].workload.tokens[: len(sequences)])

    def _launch_prompts(self, prefills: list[Prefill]) -> None:
        """All tokens of all prompts, one below the other, in as few pieces as the largest size allows."""
        if not any(each.end > each.start for each in prefills):
            return
        tokens = np.concatenate([each.sequence.tokens[each.start : each.end] for each in prefills])
        slots = np.concatenate([np.full(each.end - each.start, each.sequence.slot) for each in prefills])
        positions = np.concatenate([np.arange(each.start, each.end) for each in prefills])
        most = max(self._prompts)
        for start in range(0, len(tokens), most):
            piece = slice(start, start + most)
            count = len(tokens[piece])
            rows = next(size for size in self._prompts if size >= count)
            inputs = self._spare_rows(rows, 2 + tokens.shape[1])
            inputs[0, :count], inputs[1, :count], inputs[2:, :count] = slots[piece], positions[piece], tokens[piece].T
            self._prompts[rows].run(inputs)

    def _spare_rows(self, rows: int, height: int) -> np.ndarray:
        """Inputs of rows that stand for nobody: token 0 of the spare slot."""
        inputs = np.zeros((height, rows), np.int32)
        inputs[0] = self.eager.slots.spare
        return inputs

    def _capture(self) -> None:
        self._tables.upload(self._padded)
        pool = None
        works: list[CapturedGraph[Any]] = [*self._frames.values(), *self._prompts.values()]
        compile_ahead(captured.workload for captured in works)
        # The largest first: the smaller ones then find all the memory they need in the pool it leaves.
        for captured in sorted(works, key=lambda each: -each.workload.inputs.shape[1]):
            height, rows = captured.workload.inputs.shape
            captured.host_buffer.upload(self._spare_rows(rows, height))
            pool = captured.capture(pool)
