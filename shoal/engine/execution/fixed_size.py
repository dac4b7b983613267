"""Base of the backends that run prefill and decode at fixed sizes, so that CUDA graphs can capture them.

A batch uses the smallest size that holds it; padding rows work on the spare slot and the spare block, which are never
read. A prompt is prefilled up to its last token, which is then decoded like any newest token: the first frame goes
through the same graph as all others.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.engine.execution.runner import EagerRunner, PendingStep
from shoal.engine.execution.text_rows import TextRows
from shoal.engine.scheduling.scheduler import Batch, Prefill
from shoal.engine.scheduling.sequence import Sequence
from shoal.kernels.cuda_graph import GraphSizes, HostBuffer, Workload

# Default batch sizes up to 128. Larger ones are multiples of 64, the rows of a tile: 64 apart up to 512, then at most a
# quarter.
SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


def batch_sizes(slots: int, buckets: Iterable[int] = ()) -> list[int]:
    """Return the batch sizes of graphs for `slots`, the last of them, in ascending order.

    Without `buckets` they are chosen so that padding costs at most a third of a batch of more than sixteen.
    """
    sizes = set(buckets or (*SMALL_SIZES, *_large_sizes(slots)))
    return sorted({min(size, slots) for size in sizes} | {slots})


def _large_sizes(slots: int) -> Iterator[int]:
    size = SMALL_SIZES[-1]
    while size < slots:
        size += max(64, 1 << (size.bit_length() - 3))
        yield size


class FrameWorkload(Workload, Protocol):
    """Workload that decodes one frame: inputs [2, rows] are slots and positions."""

    tokens: Tensor  # [rows, 1 + codebooks]


class FixedSizeRunner(ABC):
    """Launches steps through workloads of fixed sizes. Sizes that fail are left out as long as others remain."""

    def __init__(self, eager: EagerRunner) -> None:
        self.eager = eager
        shape = (len(eager.tables) + 1, eager.tables.shape[1])
        spare = torch.full(shape, eager.kv.spare, dtype=torch.int32, device=eager.model.device)
        self._tables = HostBuffer(spare)
        self._padded = np.full(shape, eager.kv.spare, np.int32)

    @property
    @abstractmethod
    def graphs(self) -> tuple[GraphSizes[Any, Any], ...]:
        """Return the sizes of all kinds of workloads."""

    @abstractmethod
    def _launch_frames(self, batch: Batch, sequences: list[Sequence]) -> PendingStep:
        """Launch the next frame of the sequences, which are those that `batch` samples."""

    @abstractmethod
    def _launch_prompts(self, prefills: list[Prefill]) -> None:
        """Write keys and values of the tokens of prompts; empty prefills are allowed."""

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        self._padded[:-1] = self.eager.tables
        self._tables.upload(self._padded)
        sampled = [prefill for prefill in batch.prefills if prefill.samples_frame]
        self.eager.slots.bind([prefill.sequence for prefill in sampled])
        self._launch_prompts([replace(each, end=each.end - each.samples_frame) for each in batch.prefills])
        sequences = [sequence for sequence, _ in batch.sampled()]
        return self._launch_frames(batch, sequences) if sequences else PendingStep(batch)

    def drop_failed(self) -> bool:
        """Leave out the size whose last launch raised; return whether the batch can be run by other sizes."""
        dropped = [sizes.drop_failed() for sizes in self.graphs]
        return any(dropped)

    def restore(self) -> None:
        """Use sizes again that failed in service."""
        for sizes in self.graphs:
            sizes.restore()

    @property
    def dropped(self) -> list[str]:
        """Return kind, size and reason of every size that is left out."""
        return [f"{each.name} {size}: {reason}" for each in self.graphs for size, reason in each.dropped.items()]


def frame_inputs(workload: FrameWorkload, sequences: list[Sequence], texts: TextRows | None = None) -> np.ndarray:
    """Return inputs for the newest token of each sequence; the other rows are padding.

    With `texts` the inputs have two more rows: begins and lengths of the texts.
    """
    inputs = workload.padding()
    inputs[0, : len(sequences)] = [sequence.slot for sequence in sequences]
    inputs[1, : len(sequences)] = [sequence.computed - 1 for sequence in sequences]
    if texts:
        inputs[2, : len(sequences)], inputs[3, : len(sequences)] = texts.begins, texts.lengths
    return inputs
