"""Convolutions of the codec decoder in CUDA C++, for Hopper GPUs and the channel counts of the released codec.

They are bit-identical to `codec_decoder.residual_unit` and `codec_decoder.conv`: products are added in the same order,
so the faster kernel may be chosen by the number of rows. An operand may begin at any row of shared memory, which Triton
does not support, so all taps of a convolution read one copy of the inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.kernels.codec_decoder.conv import Taps
from shoal.kernels.codec_decoder.packing import Packing
from shoal.kernels.sm90.launch import Sm90Kernel, is_hopper, kernels_unavailable, load_kernels
from shoal.kernels.sm90.source import CONV_UNIT, ConvVariant

logger = logging.getLogger(__name__)

MAX_DILATION = 9
# Kernels and the number of rows from which they are faster than Triton's on an H200.
UNIT_96, UNIT_192 = ConvVariant("residual_unit", 96, 96), ConvVariant("residual_unit", 192, 192)
CONV_384 = ConvVariant("conv", 384, 384)
UPSAMPLE_192, UPSAMPLE_384 = ConvVariant("conv", 192, 192, taps=2), ConvVariant("conv", 384, 768, taps=2)
MIN_ROWS = {UNIT_96: 1 << 14, UNIT_192: 1 << 13, CONV_384: 1 << 14, UPSAMPLE_192: 1 << 14, UPSAMPLE_384: 1 << 14}


class Sm90Weights(NamedTuple):
    """Packed weights of a layer and the kernel that reads them."""

    kernel: Sm90Kernel[ConvVariant]
    weight: Tensor

    @property
    def whole_unit(self) -> bool:
        """Return whether the kernel computes a residual unit, not only its dilated convolution."""
        return self.kernel.variant.name == "residual_unit"

    def applies(self, rows: int, rate: int) -> bool:
        """Return whether the kernel supports this number of rows, `rate` per frame, and is faster than Triton's."""
        return rows >= MIN_ROWS[self.kernel.variant] and rate % self.kernel.tile_rows == 0


def unit_variant(inner: Taps, outer: Taps) -> ConvVariant | None:
    """Return the kernel of a residual unit (dilated, pointwise), None if there is none of its shape and dtype."""
    taps, outputs, channels = inner.weight.shape
    if outputs != channels or outer.weight.shape != (1, channels, channels) or inner.dilation > MAX_DILATION:
        return None
    candidates = (UNIT_96, UNIT_192, CONV_384)
    return _matching(inner, taps, (each for each in candidates if each.channels == channels))


def upsample_variant(layer: Taps) -> ConvVariant | None:
    """Return the kernel of an upsampling convolution, None if there is none of its shape and dtype."""
    taps, outputs, channels = layer.weight.shape
    candidates = (UPSAMPLE_192, UPSAMPLE_384)
    return _matching(layer, taps, (each for each in candidates if (each.channels, each.outputs) == (channels, outputs)))


def _matching(layer: Taps, taps: int, candidates: Iterable[ConvVariant]) -> ConvVariant | None:
    found = next((each for each in candidates if each.taps == taps), None)
    return found if layer.weight.dtype == torch.float16 else None


def pack_layers(layers: Sequence[tuple[Taps, ...]]) -> list[Sm90Weights | None]:
    """Pack residual units (dilated, pointwise) and upsampling convolutions (one element) for their kernels.

    None where the Triton kernels are used: on other GPUs, for other shapes, and, with a warning, on a Hopper GPU where
    the kernels cannot be compiled or loaded.
    """
    device = layers[0][0].weight.device
    if (reason := kernels_unavailable(device)) is None:
        variants = [unit_variant(*each) if len(each) == 2 else upsample_variant(*each) for each in layers]
        try:
            kernels = load_kernels({each for each in variants if each is not None}, device)
        except RuntimeError as error:  # KernelError, or a library that cuda-bindings does not find
            reason = str(error)
        else:
            chosen = [None if each is None else kernels[each] for each in variants]
            return [None if each is None else _pack(each, *taps) for each, taps in zip(chosen, layers, strict=True)]
    if is_hopper(device):
        logger.warning("codec: CUDA C++ kernels for Hopper are not used, Triton's are slower: %s", reason)
    return [None] * len(layers)


def _pack(kernel: Sm90Kernel[ConvVariant], *layers: Taps) -> Sm90Weights:
    pack: Callable[..., Tensor] = pack_residual_unit if kernel.variant.name == "residual_unit" else pack_conv
    return Sm90Weights(kernel, pack(*layers))


def pack_residual_unit(inner: Taps, outer: Taps) -> Tensor:
    """Return the weights of both convolutions in the order in which src/residual_unit.cu loads them."""
    pointwise = outer.weight[:, neighbours(outer.weight.shape[1], outer.weight.device)]
    return torch.cat((_columns(inner.weight), _columns(pointwise))).flatten()


def pack_conv(layer: Taps, *_: Taps) -> Tensor:
    """Return the weights of a convolution in the order in which src/conv.cu loads them: 192 outputs at a time."""
    units = layer.weight[:, neighbours(layer.weight.shape[1], layer.weight.device)].split(CONV_UNIT, dim=1)
    return torch.cat([_columns(unit) for unit in units]).flatten()


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
    weights: Sm90Weights,
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
    kernel = weights.kernel
    kernel.launch(
        kernel.blocks(len(x)), x, activated, weights.weight, *parameters, *streams, out, out_activated, *sizes
    )
    return out, out_activated


def conv(
    x: Tensor, weights: Sm90Weights, layer: Taps, alpha: Tensor, past: Tensor, packing: Packing
) -> tuple[Tensor, Tensor]:
    """Convolve x [rows, channels] -> y and snake(y) [rows, outputs]; a dilated convolution returns x instead of y."""
    variant = weights.kernel.variant
    activated = x.new_empty(len(x), variant.outputs)
    out = torch.empty_like(activated) if variant.taps == 2 else x
    streams = past, packing.slots, packing.starts
    sizes = len(x), packing.rate(x), layer.dilation, len(alpha)
    kernel = weights.kernel
    kernel.launch(kernel.blocks(len(x)), x, weights.weight, layer.bias, alpha, *streams, out, activated, *sizes)
    return out, activated
