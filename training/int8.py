"""Quantise matrices to int8 with one scale per row, in upstream's layout."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from shoal.checkpoint.save import upstream_tensors
from shoal.model.dual_ar import DualAR
from shoal.model.linear import quantize_rows


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [rows, columns] -> int8 [rows, columns] and fp32 scales [rows]; weight ~ int8 * scale."""
    return quantize_rows(weight, torch.int8, torch.float32)


def dequantize(stored: Tensor, scales: Tensor) -> Tensor:
    return stored.float() * scales[:, None]


def int8_tensors(model: DualAR) -> dict[str, Tensor]:
    """Return the tensors under upstream's names: matrices as int8 `X.weight` and `X.scales`, the rest in fp16."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in upstream_tensors(model).items():
        if tensor.dim() == 2:
            tensors[name], tensors[name.replace(".weight", ".scales")] = int8_rows(tensor)
        else:
            tensors[name] = tensor.half()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def int8_rounded(model: DualAR) -> DualAR:
    """Return a copy of the model with its weights rounded to int8."""
    rounded = copy.deepcopy(model)
    for module in rounded.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.copy_(dequantize(*int8_rows(module.weight)))
    return rounded
