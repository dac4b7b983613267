"""Select the layers of a model that run in CUDA C++ for few rows: on Hopper GPUs, if they are as wide as S2-Pro's."""

import logging
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from shoal.kernels.cuda_graph import compile_ahead
from shoal.kernels.sm90.few_rows import BitComparison, LinearWeights, linear_variants, pack_linear
from shoal.kernels.sm90.launch import is_hopper, kernels_unavailable, load_kernels
from shoal.kernels.sm90.source import LinearVariant
from shoal.model.dual_ar import DualAR
from shoal.model.layers import TransformerBlock
from shoal.model.linear import AnyLinear, row_scales, uses_kernel

logger = logging.getLogger(__name__)


class FewRowsLayers:
    """Weights of the layers that have CUDA C++ kernels for few rows."""

    def __init__(self, weights: Mapping[nn.Module, LinearWeights]) -> None:
        self._weights = weights

    def __len__(self) -> int:
        return len(self._weights)

    def find(self, layer: nn.Module, rows: int) -> LinearWeights | None:
        """Return the weights of a layer; None if it has no kernel for this number of rows."""
        found = self._weights.get(layer)
        return found if found is not None and found.supports_rows(rows) else None


def few_rows_layers(model: DualAR) -> FewRowsLayers:
    """Load the kernels and pack the layers of a model for them.

    The result is empty on other GPUs, for models without layers of a supported size and dtype, and, with a warning, if
    a kernel cannot be compiled or its bits differ from those of the Triton kernel.
    """
    layers = _wide_layers(model) if is_hopper(model.device) else {}
    if not layers:
        return FewRowsLayers({})
    reason = kernels_unavailable(model.device)
    if reason is None:
        try:
            packed = _pack(layers, model.device)
            reason = _difference(packed)
        except RuntimeError as error:  # KernelError, or a library that cuda-bindings does not find
            reason = str(error)
        else:
            if reason is None:
                return FewRowsLayers(packed)
    logger.warning("CUDA C++ kernels for few voices are not used, Triton's are slower: %s", reason)
    return FewRowsLayers({})


class _Use(NamedTuple):
    """Use of a layer: its input is normed, or its output is added to the residual stream; optionally only its first
    outputs.
    """

    layer: AnyLinear
    norm: bool
    gated: bool = False
    outputs: int | None = None  # None: all


def _uses(model: DualAR) -> Iterator[_Use]:
    for block in (*model.slow.layers, *model.fast.layers):
        assert isinstance(block, TransformerBlock)
        yield _Use(block.attention.wqkv, norm=True)
        yield _Use(block.attention.wo, norm=False)
        yield _Use(block.feed_forward.w13, norm=True, gated=True)
        yield _Use(block.feed_forward.w2, norm=False)
    yield _Use(model.fast.output, norm=True, outputs=model.config.residual_size)


def _wide_layers(model: DualAR) -> dict[_Use, list[LinearVariant]]:
    """Return the kernel variants of every layer that is supported."""
    found = {}
    for use in _uses(model):
        layer, int8 = use.layer, uses_kernel(use.layer, "int8_activations")
        if layer.bias is None and (int8 or isinstance(layer, nn.Linear)):
            weight = layer.weight[: use.outputs]
            found[use] = linear_variants(weight, norm=use.norm, gated=use.gated, int8_activations=int8)
    return {use: variants for use, variants in found.items() if variants}


def _pack(layers: Mapping[_Use, list[LinearVariant]], device: torch.device) -> dict[nn.Module, LinearWeights]:
    kernels = load_kernels({each for variants in layers.values() for each in variants}, device)
    packed: dict[nn.Module, LinearWeights] = {}
    for use, variants in layers.items():
        scales = row_scales(use.layer)
        scales = None if scales is None else scales[: use.outputs]
        packed[use.layer] = pack_linear(use.layer.weight[: use.outputs], scales, [kernels[each] for each in variants])
    return packed


@torch.inference_mode()
def _difference(packed: Mapping[nn.Module, LinearWeights]) -> str | None:
    """Compare one layer of each variant with the Triton kernels; return the first difference, or None."""
    kinds = {tuple(kernel.variant for kernel in each.kernels.values()): each for each in packed.values()}
    comparisons = [BitComparison(each) for each in kinds.values()]
    compile_ahead(comparisons)
    for each in comparisons:
        each.run()
        if unequal := int(each.unequal):
            return f"{unequal} values differ from Triton's in a layer of {list(each.weights.weight.shape)}"
    return None
