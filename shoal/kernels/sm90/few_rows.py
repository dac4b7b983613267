"""Linear layers of up to eight rows in CUDA C++, for Hopper GPUs and layers as wide as those of S2-Pro.

A frame of one sequence reads every weight once. These kernels copy weights to shared memory with the copy engine (TMA)
before their inputs are ready, and fuse what the Triton path launches separately: RMSNorm, quantization of the rows, the
residual add. They are bit-identical to the Triton kernels, so a request has the same codes alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.kernels.int8_rows import int8_rows
from shoal.kernels.jit import compiling_only, multiprocessor_count
from shoal.kernels.linear.linear import linear
from shoal.kernels.rms_norm import fused_rms_norm, int8_rms_norm
from shoal.kernels.sm90.launch import Sm90Kernel, TensorMap, encode_tensor_map
from shoal.kernels.sm90.source import LinearVariant

ROWS = (1, 2, 4, 8)  # sizes of frame graphs; a frame of four sequences begins with eight rows
# Each block quantizes all rows, so eight rows are slower than with Triton (a frame of S2-Pro: 4.44 instead of 4.13 ms).
INT8_ROWS = (1, 2, 4)
# Widths of the residual stream. Narrower models, such as S1-mini, are faster with the Triton kernels: there the inputs
# take longer to reach all blocks than the product takes. RMSNorm adds squares in the order that the norm kernel has for
# rows of 2,049 to 4,096 elements.
WIDTHS = range(2560, 4097)
BLOCK_BYTES = 128  # bytes of a weight row per block: the width of the swizzle


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """Weights of a layer in the form that its kernels read."""

    weight: Tensor  # [out, in], with a gate [2 out, in]
    scales: Tensor | None  # [out] fp32, of int8 weights
    tensor_map: TensorMap  # descriptor for the copy engine
    kernels: Mapping[int, Sm90Kernel[LinearVariant]]  # by rows

    def supports_rows(self, rows: int) -> bool:
        """Return whether there is a kernel for this number of rows."""
        return rows in self.kernels

    def project(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Apply RMSNorm and the layer to x [rows, in]."""
        kernel = self.kernels[len(x)]
        out = x.new_empty(len(x), kernel.variant.outputs)
        self._launch(kernel, x, norm, out, eps)
        return out

    def add(self, x: Tensor, inner: Tensor) -> None:
        """Add layer(inner) to x [rows, out] in place."""
        self._launch(self.kernels[len(x)], inner, x, x, 0.0)

    def _launch(self, kernel: Sm90Kernel[LinearVariant], x: Tensor, norm: Tensor, out: Tensor, eps: float) -> None:
        scales = x if self.scales is None else self.scales
        kernel.launch(kernel.multiprocessors, x, self.tensor_map, scales, norm, out, float(eps))


def linear_variants(
    weight: Tensor, *, norm: bool, gated: bool = False, int8_activations: bool = False
) -> list[LinearVariant]:
    """Return the kernels of a layer, one for each number of rows that fits, or none if the layer is not supported.

    A layer has a norm before it, or is added to a residual.
    """
    outputs, columns = len(weight) // (2 if gated else 1), weight.shape[1]
    blocks = multiprocessor_count(weight.device)
    numbers = INT8_ROWS if int8_activations else ROWS
    variants = [LinearVariant(rows, columns, outputs, norm, gated, int8_activations, blocks) for rows in numbers]
    tile = variants[0].lines // (2 if gated else 1)
    supported = (
        weight.dtype == (torch.int8 if int8_activations else torch.bfloat16)
        and (columns if norm else outputs) in WIDTHS
        and columns * weight.element_size() % (4 * BLOCK_BYTES) == 0
        and outputs % tile == 0
    )
    return [each for each in variants if each.fits] if supported else []


def pack_linear(weight: Tensor, scales: Tensor | None, kernels: Sequence[Sm90Kernel[LinearVariant]]) -> LinearWeights:
    """Return the weights for these kernels, which differ in rows only. `weight` must stay where it is."""
    tensor_map = _tensor_map(weight, kernels[0].variant)
    by_rows = {kernel.variant.rows: kernel for kernel in kernels}
    return LinearWeights(weight, None if scales is None else scales.float().contiguous(), tensor_map, by_rows)


def _tensor_map(weight: Tensor, variant: LinearVariant) -> TensorMap:
    """Describe weights as [split of K, block of a split, gate or up, row, byte] and the box that one copy takes."""
    row, parts = weight.shape[1] * weight.element_size(), 2 if variant.gated else 1
    split = row // 4
    sizes = (BLOCK_BYTES, variant.outputs, parts, split // BLOCK_BYTES, 4)
    strides = (row, variant.outputs * row, BLOCK_BYTES, split)
    box = (BLOCK_BYTES, variant.lines // parts, parts, variant.box_blocks, 4)
    return encode_tensor_map(weight.data_ptr(), sizes, strides, box)


class BitComparison:
    """Compares the kernels of a layer with the Triton kernels over random rows.

    Another version of Triton may add squares in another order. That changes one bit of a normalized value in about one
    row of 25, so many rows are compared.
    """

    ROUNDS = 128
    EPS = 1e-6

    def __init__(self, weights: LinearWeights) -> None:
        self.weights, device = weights, weights.weight.device
        self.unequal = torch.zeros((), dtype=torch.int64, device=device)
        self._random = torch.Generator(device).manual_seed(0)

    def run(self) -> None:
        self.unequal.zero_()
        for kernel in self.weights.kernels.values():
            for scale in self._scales(1 if compiling_only() else self.ROUNDS):
                self.unequal += self._compare(kernel.variant, scale)

    def _scales(self, rounds: int) -> list[float]:
        """Return standard deviations of the rows, from those of an embedding to those after many layers."""
        return [10.0 ** (4 * index / rounds - 2) for index in range(rounds)]

    def _compare(self, variant: LinearVariant, scale: float) -> Tensor:
        """Return the number of unequal outputs for one input."""
        x = self._normal(variant.rows, variant.columns) * scale
        if variant.norm:
            norm = self._normal(variant.columns)
            ours, expected = self.weights.project(x, norm, self.EPS), self._projected(variant, x, norm)
        else:
            ours = self._normal(variant.rows, variant.outputs)
            rows = int8_rows(x) if variant.int8 else x
            expected = linear(rows, self.weights.weight, scales=self.weights.scales, residual=ours.clone())
            self.weights.add(ours, x)
        return (ours.view(torch.int16) != expected.view(torch.int16)).sum()

    def _projected(self, variant: LinearVariant, x: Tensor, norm: Tensor) -> Tensor:
        normed = int8_rms_norm(x, norm, self.EPS) if variant.int8 else fused_rms_norm(x, norm, self.EPS)
        return linear(normed, self.weights.weight, scales=self.weights.scales, gated=variant.gated)

    def _normal(self, *shape: int) -> Tensor:
        device = self.weights.weight.device
        return torch.randn(shape, generator=self._random, dtype=torch.bfloat16, device=device)
