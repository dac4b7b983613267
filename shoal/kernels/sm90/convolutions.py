"""Convolutions of the codec decoder in CUDA C++, for Hopper GPUs and the channel counts of the released codec.

They give the bits of `codec_decoder.residual_unit` and `codec_decoder.conv`: products are added in the same order, so
the faster kernel may be chosen by the number of rows. Triton has no operand at a row offset; with one, all taps of a
convolution read one copy of the inputs from shared memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.kernels.codec_decoder.conv import Taps
from shoal.kernels.codec_decoder.packing import Packing
from shoal.kernels.sm90.launch import (
    KernelError,
    Sm90Kernel,
    compile_kernels,
    is_hopper,
    kernels_unavailable,
    load_kernel,
)

logger = logging.getLogger(__name__)

TAPS = 7
MAX_DILATION = 9


class Layer(NamedTuple):
    """Kernel of a layer and the number of rows from which it is faster than Triton's on an H200."""

    kernel: str
    min_rows: int


# By channels: a whole residual unit in one launch, or its dilated convolution alone.
LAYERS = {96: Layer("residual_unit", 1 << 14), 192: Layer("residual_unit", 1 << 13), 384: Layer("conv", 1 << 14)}


class UnitWeights(NamedTuple):
    """Packed weights of a residual unit or of its dilated convolution, and the kernel that reads them."""

    kernel: Sm90Kernel
    weight: Tensor
    min_rows: int
    whole_unit: bool

    def applies(self, rows: int, rate: int) -> bool:
        """Return whether the kernel takes so many rows, `rate` of each frame, and is faster than Triton's."""
        return rows >= self.min_rows and rate % self.kernel.tile_rows == 0


def pack_units(units: Sequence[tuple[Taps, Taps]]) -> list[UnitWeights | None]:
    """Pack residual units (dilated, pointwise) for the kernels of their sizes; None where the Triton kernels are used.

    On a Hopper GPU whose kernels cannot be compiled or loaded all are None, with a warning.
    """
    device = units[0][0].weight.device
    if (reason := kernels_unavailable(device)) is None:
        wanted = {
            (layer.kernel, inner.weight.shape[1]) for inner, outer in units if (layer := find_layer(inner, outer))
        }
        try:
            compile_kernels(wanted)
            return [_pack(inner, outer) for inner, outer in units]
        except KernelError as error:
            reason = str(error)
    if is_hopper(device):
        logger.warning("codec: CUDA C++ kernels for Hopper are not used, Triton's are slower: %s", reason)
    return [None] * len(units)


def find_layer(inner: Taps, outer: Taps) -> Layer | None:
    """Return the kernel of a residual unit, None if there is none of its size and dtype."""
    taps, outputs, channels = inner.weight.shape
    if outputs != channels or outer.weight.shape != (1, channels, channels) or inner.weight.dtype != torch.float16:
        return None
    return LAYERS.get(channels) if taps == TAPS and inner.dilation <= MAX_DILATION else None


def _pack(inner: Taps, outer: Taps) -> UnitWeights | None:
    layer = find_layer(inner, outer)
    if layer is None:
        return None
    kernel = load_kernel(layer.kernel, inner.weight.shape[1], inner.weight.device)
    whole_unit = layer.kernel == "residual_unit"
    weight = pack_residual_unit(inner, outer) if whole_unit else pack_conv(inner)
    return UnitWeights(kernel, weight, layer.min_rows, whole_unit)


def pack_residual_unit(inner: Taps, outer: Taps) -> Tensor:
    """Return the weights of both convolutions in the order in which src/residual_unit.cu loads them."""
    pointwise = outer.weight[:, neighbours(outer.weight.shape[1], outer.weight.device)]
    return torch.cat((_columns(inner.weight), _columns(pointwise))).flatten()


def pack_conv(inner: Taps) -> Tensor:
    """Return the weights of the dilated convolution in the order in which src/conv.cu loads them: half by half."""
    halves = inner.weight[:, neighbours(inner.weight.shape[1], inner.weight.device)].chunk(2, dim=1)
    return torch.cat([_columns(half) for half in halves]).flatten()


def _columns(weight: Tensor) -> Tensor:
    """Return weight [taps, out, in] as columns of eight inputs: [taps, in / 8, out, 8]."""
    return weight.unflatten(2, (-1, 8)).transpose(1, 2).contiguous()


def neighbours(channels: int, device: torch.device) -> Tensor:
    """Return the order of output channels in which a thread's accumulators are eight neighbouring channels.

    Of 32 columns, thread q of four has 8 j + 2 q and 8 j + 2 q + 1 for j = 0 to 3.
    """
    return torch.arange(channels, device=device).view(-1, 4, 4, 2).transpose(1, 2).flatten()


def residual_unit(
    x: Tensor,
    activated: Tensor,
    weights: UnitWeights,
    inner: Taps,
    inner_alpha: Tensor,
    outer: Taps,
    outer_alpha: Tensor,
    past: Tensor,
    packing: Packing,
) -> tuple[Tensor, Tensor]:
    """Compute `residual_unit_reference` in one launch."""
    out, out_activated = torch.empty_like(x), torch.empty_like(x)
    parameters = inner.bias, inner_alpha, outer.bias, outer_alpha
    streams = past, packing.slots, packing.starts
    sizes = len(x), packing.rate(x), inner.dilation
    weights.kernel.launch(len(x), x, activated, weights.weight, *parameters, *streams, out, out_activated, *sizes)
    return out, out_activated


def conv(x: Tensor, weights: UnitWeights, inner: Taps, alpha: Tensor, past: Tensor, packing: Packing) -> Tensor:
    """Return the Snake of a dilated convolution of x [rows, channels]."""
    activated = torch.empty_like(x)
    streams = past, packing.slots, packing.starts
    sizes = len(x), packing.rate(x), inner.dilation
    weights.kernel.launch(len(x), x, weights.weight, inner.bias, alpha, *streams, activated, *sizes)
    return activated
