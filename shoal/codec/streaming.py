"""Exact streaming: left context of the causal layers, and a decoder with per-slot state.

Every layer of the codec has a fixed left context, so the state of a layer is the last `steps` inputs it saw. Layers
prepend it through one call, `join`: zeros at the start of a stream, which is the zero padding of the whole-utterance
network, or the stored inputs of an earlier call. Streaming and whole-utterance decoding are the same forward pass, and
any chunking gives the samples of the whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from shoal.codec.dac import Codec

# oneDNN builds primitives per input shape, and each length of a recording is a new shape: only the capacity of its
# cache bounds their memory. After encoding 120 lengths with nano, a process stays at 650 MiB with 1,024 primitives
# (about twenty shapes), and is at 744 MiB and growing with 4,096. The native decoder uses no primitives; the eager
# decoder rebuilds them when chunk sizes vary a lot.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024")


class Past(Protocol):
    """Source of the left context of causal layers."""

    @property
    def position(self) -> Tensor | None:
        """Return the frames already seen by each row [n]; None if every row is at its start."""

    def join(self, x: Tensor, steps: int) -> Tensor:
        """Prepend the last `steps` inputs to x [n, channels, T] -> [n, channels, steps + T]."""


class NoPast:
    """Left context of a whole utterance: zero padding, no state is kept."""

    position = None

    def join(self, x: Tensor, steps: int) -> Tensor:
        return F.pad(x, (steps, 0))


class SlotPast:
    """Left context of many streams: one buffer per stateful layer, in call order, with one row per slot."""

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
        """Begin a pass over `frames` new frames of slots `rows` [n]; lengths[i] of row i are valid (None: all).

        Call `close` after the pass.
        """
        self._rows, self._frames, self._lengths, self._next = rows, frames, lengths, 0

    def close(self) -> None:
        """End the pass: count its frames."""
        self.frames_seen[self._rows] += self._frames if self._lengths is None else self._lengths

    def reset(self, rows: Tensor) -> None:
        for state in (self.frames_seen, *self.buffers):
            state.index_fill_(0, rows, 0)

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
        """Return the last `steps` valid inputs of each row; padding on the right is not part of the stream."""
        if self._lengths is None:
            return joined[..., -steps:]
        rate = (joined.shape[-1] - steps) // self._frames
        at = (self._lengths * rate)[:, None] + torch.arange(steps, device=joined.device)
        return joined.gather(-1, at[:, None, :].expand(-1, joined.shape[1], -1))


class StreamingDecoder:
    """Streaming decoder with per-slot state; every slot continues where its last call ended.

    State per slot of the full-size codec in fp32: 134,208 floats of left context for the convolutions and
    8 layers x 127 x 2 x 1,024 of keys and values, 8.9 MB in all; half of it in bf16.
    """

    backend: Literal["eager"] = "eager"

    def __init__(self, codec: Codec, slots: int) -> None:
        self.codec = codec
        self.past = SlotPast(slots, codec.device)
        self._seen = [0] * slots  # frames per slot, counted on the host to avoid a device synchronization

    @torch.inference_mode()
    def decode(self, codes: Tensor, slots: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
        """Decode codes [n, codebooks, T] of n different slots -> samples [n, frame_length * T].

        With `lengths` [n] only the first lengths[i] frames of row i are valid. The samples after them are undefined,
        to be cut off by the caller, and do not affect the state of the slot.
        """
        for slot, new in zip(slots, lengths or [codes.shape[-1]] * len(slots), strict=True):
            self._seen[slot] += new
        self.codec.reserve(max(self._seen) + codes.shape[-1])
        valid = None if lengths is None else torch.tensor(lengths, device=self.codec.device)
        self.past.open(self._rows(slots), codes.shape[-1], valid)
        samples = self.codec.decode_from(codes.to(self.codec.device), self.past)
        self.past.close()
        return samples

    @torch.inference_mode()
    def reset(self, slots: Sequence[int]) -> None:
        """Reset the state of these slots; their next frame is the first of a stream."""
        for slot in slots:
            self._seen[slot] = 0
        self.past.reset(self._rows(slots))

    def _rows(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, device=self.codec.device)
