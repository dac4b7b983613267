"""Matrices as int8 with one scale per row: half the bytes of fp16, in upstream's layout."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from shoal.checkpoint.save import upstream_tensors
from shoal.model.dual_ar import DualAR
from shoal.model.linear import quantize_rows


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] -> int8 [rows, columns] and fp32 scales [rows]; weight ~ int8 * scale."""
    return quantize_rows(weight, torch.int8, torch.float32)


def dequantize(stored: Tensor, scales: Tensor) -> Tensor:
    return stored.float() * scales[:, None]


def int8_tensors(model: DualAR) -> dict[str, Tensor]:
    """The model under upstream's names: each matrix `X.weight` int8 with `X.scales` beside it, the rest fp16."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in upstream_tensors(model).items():
        if tensor.dim() == 2:
            tensors[name], tensors[name.replace(".weight", ".scales")] = int8_rows(tensor)
        else:
            tensors[name] = tensor.half()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def int8_rounded(model: DualAR) -> DualAR:
    """A copy that computes with what int8 storage keeps of the weights."""
    rounded = copy.deepcopy(model)
    for module in rounded.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.copy_(dequantize(*int8_rows(module.weight)))
    return rounded
