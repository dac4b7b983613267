"""Linear layers over upstream's quantised weights, computed as upstream computes them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Int8Linear(nn.Module):
    """Symmetric per-row int8: y = (x · wᵀ) · scale."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(out_features, dtype=torch.bfloat16))
        self.weight: Tensor
        self.scales: Tensor

    def forward(self, x: Tensor, count: int | None = None) -> Tensor:
        return F.linear(x, self.weight[:count].to(x.dtype)) * self.scales[:count].to(x.dtype)

    def take_rows(self, rows: Tensor) -> "Int8Linear":
        taken = Int8Linear(self.weight.shape[1], 0)
        taken.weight, taken.scales = self.weight[rows], self.scales[rows]
        return taken


class Int4Linear(nn.Module):
    """Affine int4 in groups of columns: w = (q - 8) · scale + zero. Two columns per byte, the even one low."""

    def __init__(self, in_features: int, out_features: int, group: int) -> None:
        super().__init__()
        groups = -(-in_features // group)
        self.group = group
        self.register_buffer("weight", torch.empty(out_features, in_features // 2, dtype=torch.uint8))
        self.register_buffer("scales_and_zeros", torch.empty(groups, out_features, 2, dtype=torch.bfloat16))
        self.weight: Tensor
        self.scales_and_zeros: Tensor

    def dequantised(self, dtype: torch.dtype, count: int | None = None) -> Tensor:
        """[count or out, in]"""
        packed, affine = self.weight[:count], self.scales_and_zeros[:, :count].to(dtype)
        q = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(dtype) - 8
        scale, zero = affine.repeat_interleave(self.group, dim=0)[: q.shape[1]].unbind(-1)
        return q * scale.T + zero.T

    def forward(self, x: Tensor, count: int | None = None) -> Tensor:
        return F.linear(x, self.dequantised(x.dtype, count))

    def take_rows(self, rows: Tensor) -> "Int4Linear":
        taken = Int4Linear(2 * self.weight.shape[1], 0, self.group)
        taken.weight, taken.scales_and_zeros = self.weight[rows], self.scales_and_zeros[:, rows]
        return taken


AnyLinear = nn.Linear | Int8Linear | Int4Linear


def first_rows(layer: AnyLinear, x: Tensor, count: int) -> Tensor:
    """The first `count` outputs of a layer of any kind; the others are not computed."""
    return F.linear(x, layer.weight[:count]) if isinstance(layer, nn.Linear) else layer(x, count)


def take_rows(layer: AnyLinear, rows: Tensor) -> AnyLinear:
    """A layer of the same kind with only these outputs, in this order."""
    return dense(layer.weight.detach()[rows]) if isinstance(layer, nn.Linear) else layer.take_rows(rows)


def dense(weight: Tensor) -> nn.Linear:
    """A layer over an existing weight [out, in], without a copy."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def unpack_int4_tiles(packed: Tensor, in_features: int) -> Tensor:
    """Undo torch's tensor-core tiling: int32 [out / 8, in / (inner · 16), 32, inner / 2] -> bytes [out, in / 2].

    Lane t of a warp holds row t // 4 of its tile of eight, and of each two k-tiles of 16 columns the pairs that
    begin at 2 (t % 4) and 8 later. The eight values of an int32 lie in the order 0 2 4 6 1 3 5 7, lowest first.
    """
    n_tiles, k_outer, lanes, words = packed.shape
    shifts = 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    values = (packed.unsqueeze(-1) >> shifts) & 15  # [..., 8]: both columns of each pair, in order
    # [n_tile, k_outer, row, quad, word, k_tile, half, column]
    values = values.reshape(n_tiles, k_outer, lanes // 4, 4, words, 2, 2, 2)
    rows = values.permute(0, 2, 1, 4, 5, 6, 3, 7).reshape(n_tiles * 8, -1)[:, :in_features].to(torch.uint8)
    return rows[:, 0::2] | (rows[:, 1::2] << 4)
