"""Exact streaming: what a causal network has to remember of a stream, and a decoder that keeps it per slot.

Every layer of the codec looks only back, and only a fixed number of steps. So a layer's whole past is the last
`steps` inputs it saw. Layers ask for it through one call, `join`; with zeros for an unseen past this is the zero
padding of the whole-utterance network, and with the remembered inputs it continues a stream. There is one forward
pass, not two, and pieces of any sizes give the samples of the whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from shoal.codec.dac import Codec

# Streams come together in all numbers and lengths, and oneDNN makes kernels for each such shape. It keeps 1,024, which
# is some twenty shapes; to make them again takes nano's codec longer than to run them on a short chunk.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096")


class Past(Protocol):
    """Where layers get the inputs that came before the ones at hand."""

    @property
    def position(self) -> Tensor | None:
        """Frames already seen by each row [n]; None at the start of every stream."""

    def join(self, x: Tensor, steps: int) -> Tensor:
        """x [n, channels, T] behind its last `steps` predecessors: [n, channels, steps + T]."""


class NoPast:
    """The start of a stream whose state nobody will need again: zero padding."""

    position = None

    def join(self, x: Tensor, steps: int) -> Tensor:
        return F.pad(x, (steps, 0))


class SlotPast:
    """The remembered inputs of many streams, one row per slot, one buffer per stateful layer in call order."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.buffers: list[Tensor] = []
        self.frames_seen = torch.zeros(slots, dtype=torch.long, device=device)
        self._rows = torch.zeros(0, dtype=torch.long, device=device)
        self._lengths: Tensor | None = None
        self._frames = 0
        self._next = 0

    @property
    def position(self) -> Tensor:
        return self.frames_seen[self._rows]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def open(self, rows: Tensor, frames: int, lengths: Tensor | None) -> None:
        """Begin a pass over `frames` new frames of the slots `rows`; row i has lengths[i] real ones (all, if None)."""
        self._rows, self._frames, self._lengths, self._next = rows, frames, lengths, 0

    def close(self) -> None:
        self.frames_seen[self._rows] += self._frames if self._lengths is None else self._lengths

    def reset(self, rows: Tensor) -> None:
        self.frames_seen[rows] = 0
        for buffer in self.buffers:
            buffer[rows] = 0

    def join(self, x: Tensor, steps: int) -> Tensor:
        if steps == 0:
            return x
        buffer = self._buffer(x, steps)
        joined = torch.cat((buffer[self._rows], x), dim=-1)
        buffer[self._rows] = self._tail(joined, steps)
        return joined

    def _buffer(self, x: Tensor, steps: int) -> Tensor:
        if self._next == len(self.buffers):
            slots = len(self.frames_seen)
            self.buffers.append(x.new_zeros(slots, x.shape[1], steps))
        self._next += 1
        return self.buffers[self._next - 1]

    def _tail(self, joined: Tensor, steps: int) -> Tensor:
        """The last `steps` real inputs of each row; what was padded on the right is not part of the stream."""
        if self._lengths is None:
            return joined[..., -steps:]
        rate = (joined.shape[-1] - steps) // self._frames
        at = (self._lengths * rate)[:, None] + torch.arange(steps, device=joined.device)
        return joined.gather(-1, at[:, None, :].expand(-1, joined.shape[1], -1))


class StreamingDecoder:
    """Turns codes into samples for many streams at once; every slot continues where it stopped.

    State per slot of the full-size codec in fp32: 134,208 floats of left context for the convolutions and
    8 layers x 127 x 2 x 1,024 of keys and values, 8.9 MB in all; half of it in bf16.
    """

    def __init__(self, codec: Codec, slots: int) -> None:
        self.codec = codec
        self.past = SlotPast(slots, codec.device)
        self._seen = [0] * slots  # the host's own count, so that no pass has to read the device

    @torch.inference_mode()
    def decode(self, codes: Tensor, slots: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
        """Samples [n, frame_length * T] for codes [n, codebooks, T] of n different slots.

        With `lengths` [n] only the first lengths[i] frames of row i are real; the samples behind them are noise
        to be cut off by the caller, and they leave no trace in the slot.
        """
        for slot, new in zip(slots, lengths or [codes.shape[-1]] * len(slots), strict=True):
            self._seen[slot] += new
        self.codec.reserve(max(self._seen) + codes.shape[-1])
        real = None if lengths is None else torch.tensor(lengths, device=self.codec.device)
        self.past.open(self._rows(slots), codes.shape[-1], real)
        samples = self.codec.decode_from(codes.to(self.codec.device), self.past)
        self.past.close()
        return samples

    @torch.inference_mode()
    def reset(self, slots: Sequence[int]) -> None:
        """Forget the streams of these slots; the next frame of each is its first."""
        for slot in slots:
            self._seen[slot] = 0
        self.past.reset(self._rows(slots))

    def _rows(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, device=self.codec.device)
