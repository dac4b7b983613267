"""Streaming decoders whose calls have fixed sizes and run as CUDA graphs, on a CUDA stream of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.codec.config import MAX_POSITIONS
from shoal.kernels.cuda_graph import CaptureContext, CapturedGraph, GraphSizes, Workload, to_host

if TYPE_CHECKING:
    from shoal.codec.dac import Codec

# Streams per reset launch.
RESET_SLOTS = 8


@dataclass(frozen=True, slots=True)
class FrameSpan:
    """Frames [start, start + frames) of a row, decoded in one call."""

    row: int
    start: int
    frames: int


@dataclass(frozen=True, slots=True)
class PendingDecode:
    """Launched decode calls; `wait` returns their samples."""

    # Samples of all spans of a call: concatenated, or one padded row per span.
    calls: list[tuple[list[FrameSpan], Tensor]]
    lengths: list[int]  # frames per row
    step: int  # samples per frame
    ended: torch.cuda.Event | None

    def wait(self) -> list[np.ndarray]:
        """Wait for the device and return the samples of each row. The only synchronization of the codec."""
        if self.ended is not None:
            self.ended.synchronize()
        rows = [np.empty(length * self.step, np.float32) for length in self.lengths]
        for spans, samples in self.calls:
            for span, piece in zip(spans, self._pieces(spans, samples.numpy()), strict=True):
                begin = span.start * self.step
                rows[span.row][begin : begin + len(piece)] = piece
        return rows

    def _pieces(self, spans: list[FrameSpan], samples: np.ndarray) -> list[np.ndarray]:
        if samples.ndim == 2:
            return [row[: span.frames * self.step] for span, row in zip(spans, samples, strict=True)]
        ends = np.cumsum([span.frames * self.step for span in spans])
        return np.split(samples, ends[:-1])


class SlotState(Protocol):
    """Per-slot state of a decoder."""

    def reset(self, slots: Tensor) -> None:
        """Reset these slots to the start of a stream."""


class ResetCall:
    """Workload that resets RESET_SLOTS slots. Captured, because it is one small launch per layer and frequent."""

    def __init__(self, state: SlotState, spare: int, device: torch.device) -> None:
        self._state, self._spare = state, spare
        self.inputs = torch.full((RESET_SLOTS,), spare, dtype=torch.int32, device=device)

    def padding(self) -> np.ndarray:
        return np.full(RESET_SLOTS, self._spare, np.int32)

    def run(self) -> None:
        self._state.reset(self.inputs.long())


KeyT = TypeVar("KeyT")
CallT = TypeVar("CallT", bound=Workload)


class GraphDecoder(ABC, Generic[KeyT, CallT]):
    """Counterpart of `StreamingDecoder` on a CUDA stream of its own, so that it overlaps with the model."""

    backend: ClassVar[Literal["graph", "plain-graph"]]
    _calls: GraphSizes[KeyT, CallT]
    _reset: CapturedGraph[ResetCall]

    def __init__(self, codec: Codec, slots: int) -> None:
        self.codec = codec
        self._seen = [0] * slots  # frames per slot
        self._context = CaptureContext() if codec.device.type == "cuda" else None
        self._stream = None if self._context is None else self._context.stream

    @abstractmethod
    def _split(self, lengths: Sequence[int]) -> Iterable[list[FrameSpan]]:
        """Split frames of rows into calls that the available sizes hold; later spans of a row in later calls."""

    @abstractmethod
    def _launch(self, codes: np.ndarray, slots: Sequence[int], spans: list[FrameSpan]) -> Tensor:
        """Launch one call and return its samples on the device, which the next call may overwrite."""

    @torch.inference_mode()
    def launch(self, codes: np.ndarray, slots: Sequence[int], lengths: Sequence[int]) -> PendingDecode:
        """Launch the decoding of codes [n, codebooks, T]; only the first lengths[i] frames of row i are valid.

        Raises RuntimeError if a stream would exceed MAX_POSITIONS frames.
        """
        if not all(map(self.can_extend, slots, lengths)):
            raise RuntimeError(f"stream exceeds the limit of {MAX_POSITIONS} frames; reset the slot first")
        for slot, new in zip(slots, lengths, strict=True):
            self._seen[slot] += new
        with torch.cuda.stream(self._stream):
            calls = [(spans, to_host(self._launch(codes, slots, spans))) for spans in self._split(lengths)]
            ended = None if self._stream is None else self._stream.record_event()
        return PendingDecode(calls, list(lengths), self.codec.config.frame_length, ended)

    def can_extend(self, slot: int, frames: int) -> bool:
        """Return whether the stream of a slot can take `frames` more frames."""
        return self._seen[slot] + frames <= MAX_POSITIONS

    def decode(self, codes: Tensor, slots: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
        """Decode like `StreamingDecoder.decode`, with codes and samples on the host."""
        rows = self.launch(codes.numpy(), slots, lengths or [codes.shape[-1]] * len(slots)).wait()
        width = codes.shape[-1] * self.codec.config.frame_length
        return torch.stack([F.pad(torch.from_numpy(row), (0, width - len(row))) for row in rows])

    @torch.inference_mode()
    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._seen[slot] = 0
        with torch.cuda.stream(self._stream):
            for start in range(0, len(slots), RESET_SLOTS):
                inputs, piece = self._reset.workload.padding(), slots[start : start + RESET_SLOTS]
                inputs[: len(piece)] = piece
                self._reset.run(inputs)

    def drop_failed(self) -> bool:
        """Leave out the size whose last launch raised; return whether other sizes can decode."""
        return self._calls.drop_failed()

    def restore(self) -> None:
        """Use sizes again that failed in service."""
        self._calls.restore()

    @property
    def dropped(self) -> list[str]:
        """Return size and reason of every size that is left out."""
        return [f"{self._calls.name} {size}: {reason}" for size, reason in self._calls.dropped.items()]

    def _capture(self) -> None:
        assert self._context is not None, "only a GPU has graphs"
        self._calls.build(self._context)
        self._reset.capture(self._context)
