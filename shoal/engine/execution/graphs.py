"""The graph and fused backends: prefill and decode at a few fixed batch sizes, each captured as a CUDA graph.

A batch uses the smallest size that holds it; padding rows work on the spare slot and the spare block, which are never
read. A prompt is prefilled up to its last token, which is then decoded like any newest token: the first frame goes
through the same graph as all others.
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
    """Whether the kernels support the device and the weights of this model."""
    return kernels_available(model.device) and all(has_fused_kernels(module) for module in model.modules())


class FusedRunner:
    """Launches steps through the fused kernels; without `capture` one by one instead of as CUDA graphs."""

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
        sampled = [prefill for prefill in batch.prefills if prefill.samples_frame]
        self.eager.slots.bind([prefill.sequence for prefill in sampled])
        self._launch_prompts([replace(each, end=each.end - each.samples_frame) for each in batch.prefills])
        sequences = [sequence for sequence, _ in batch.sampled()]
        if not sequences:
            return PendingStep(batch)
        rows = next(size for size in self._frames if size >= len(sequences))
        inputs = self._padding_rows(rows, 2)
        inputs[0, : len(sequences)] = [sequence.slot for sequence in sequences]
        inputs[1, : len(sequences)] = [sequence.computed - 1 for sequence in sequences]
        self._frames[rows].run(inputs)
        return PendingStep.of(batch, self._frames[rows].workload.tokens[: len(sequences)])

    def _launch_prompts(self, prefills: list[Prefill]) -> None:
        """Prefill the tokens of all prompts, concatenated, in chunks of at most the largest captured size."""
        if not any(each.end > each.start for each in prefills):
            return
        tokens = np.concatenate([each.sequence.tokens[each.start : each.end] for each in prefills])
        slots = np.concatenate([np.full(each.end - each.start, each.sequence.slot) for each in prefills])
        positions = np.concatenate([np.arange(each.start, each.end) for each in prefills])
        largest = max(self._prompts)
        for start in range(0, len(tokens), largest):
            chunk = slice(start, start + largest)
            count = len(tokens[chunk])
            rows = next(size for size in self._prompts if size >= count)
            inputs = self._padding_rows(rows, 2 + tokens.shape[1])
            inputs[0, :count], inputs[1, :count], inputs[2:, :count] = slots[chunk], positions[chunk], tokens[chunk].T
            self._prompts[rows].run(inputs)

    def _padding_rows(self, rows: int, height: int) -> np.ndarray:
        """Return inputs [height, rows] of padding rows: position 0 of the spare slot."""
        inputs = np.zeros((height, rows), np.int32)
        inputs[0] = self.eager.slots.spare
        return inputs

    def _capture(self) -> None:
        self._tables.upload(self._padded)
        pool = None
        works: list[CapturedGraph[Any]] = [*self._frames.values(), *self._prompts.values()]
        compile_ahead(captured.workload for captured in works)
        # Largest first: the smaller graphs then reuse the memory pool of the largest.
        for captured in sorted(works, key=lambda each: -each.workload.inputs.shape[1]):
            height, rows = captured.workload.inputs.shape
            captured.host_buffer.upload(self._padding_rows(rows, height))
            pool = captured.capture(pool)
