"""Linear layers over quantised weights. int8 and int4 are stored and computed as upstream does; fp8 as its int8."""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Columns that share a scale and a zero in int4.
GROUP_SIZE = 128
# Weights that a weight-only layer dequantizes at a time: 2 MB of fp32, which stay in the cache for their product.
TILE = 1 << 19


class PerChannelLinear(nn.Module):
    """Weights of a small type with one scale per output: y = (x · wᵀ) · scale (+ bias)."""

    DTYPE: ClassVar[torch.dtype]

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=self.DTYPE))
        self.register_buffer("scales", torch.empty(out_features, dtype=torch.bfloat16))
        self.register_buffer("bias", torch.empty(out_features) if bias else None)
        self.weight: Tensor
        self.scales: Tensor
        self.bias: Tensor | None

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """The layer nearest to a plain one with this weight [out, in]."""
        return cls.from_quantized(*quantize_rows(weight, cls.DTYPE), bias)

    @classmethod
    def from_quantized(cls, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Self:
        """A layer over existing tensors, without a copy."""
        layer = cls(0, 0)
        layer.weight, layer.scales, layer.bias = weight, scales, bias
        return layer

    def forward(self, x: Tensor, count: int | None = None) -> Tensor:
        y = F.linear(x, self.weight[:count].to(x.dtype)) * self.scales[:count].to(x.dtype)
        return y if self.bias is None else y + self.bias[:count].to(x.dtype)

    def take_rows(self, rows: Tensor) -> Self:
        bias = None if self.bias is None else self.bias[rows]
        return type(self).from_quantized(_rows(self.weight, rows), self.scales[rows], bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[out, in]"""
        return (self.weight.float() * self.scales.float()[:, None]).to(dtype)


class Int8Linear(PerChannelLinear):
    DTYPE = torch.int8


class Fp8Linear(PerChannelLinear):
    DTYPE = torch.float8_e4m3fn


class DynamicInt8Linear(nn.Module):
    """int8 as a CPU does it fastest: activations become bytes too, each row by its own scale, and integers multiply.

    The scale belongs to the row, so a row's result does not depend on who else is in the batch.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("packed", torch.ops.onednn.qlinear_prepack(weight.contiguous(), None), persistent=False)
        self.register_buffer("scales", scales.float())
        self.register_buffer("zeros", torch.zeros(len(scales), dtype=torch.int32), persistent=False)
        self.register_buffer("bias", bias)
        self.packed: Tensor
        self.scales: Tensor
        self.zeros: Tensor
        self.bias: Tensor | None

    def forward(self, x: Tensor, count: int | None = None) -> Tensor:
        wide = x.flatten(0, -2).float()
        largest = wide.abs().amax(-1, keepdim=True).clamp_min_(1e-30)
        # 1 to 255 around 128; the half makes rounding of cutting off.
        q = (wide * (127 / largest)).add_(128.5).to(torch.uint8)
        y = torch.ops.onednn.qlinear_pointwise(
            q, 1 / 127, 128, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y = (y * largest)[:, :count].unflatten(0, x.shape[:-1])
        return (y if self.bias is None else y + self.bias[:count]).to(x.dtype)


class WeightOnlyInt8Linear(nn.Module):
    """int8 weights on a CPU without VNNI: a tile of rows at a time is dequantized and multiplied in floats.

    Nothing but the tile is ever held in floats.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales.float())
        self.register_buffer("bias", bias)
        self.weight: Tensor
        self.scales: Tensor
        self.bias: Tensor | None

    def forward(self, x: Tensor, count: int | None = None) -> Tensor:
        tiles = self.weight[:count].split(max(1, TILE // self.weight.shape[1]))
        y = torch.cat([F.linear(x, tile.to(x.dtype)) for tile in tiles], dim=-1) * self.scales[:count]
        return (y if self.bias is None else y + self.bias[:count]).to(x.dtype)


# int8 weights as a CPU computes them.
CpuInt8Linear = DynamicInt8Linear | WeightOnlyInt8Linear


class Int4Linear(nn.Module):
    """Affine int4 in groups of columns: w = (q - 8) · scale + zero. Two columns per byte, the even one low."""

    def __init__(self, in_features: int, out_features: int, group: int) -> None:
        super().__init__()
        groups = -(-in_features // group)
        self.group_size = group
        self.register_buffer("weight", torch.empty(out_features, in_features // 2, dtype=torch.uint8))
        self.register_buffer("scales_and_zeros", torch.empty(groups, out_features, 2, dtype=torch.bfloat16))
        self.weight: Tensor
        self.scales_and_zeros: Tensor

    @classmethod
    def from_weight(cls, weight: Tensor, group: int = GROUP_SIZE) -> "Int4Linear":
        """The layer nearest to a plain one with this weight [out, in]."""
        layer = cls(0, 0, group)
        layer.weight, layer.scales_and_zeros = quantize_groups(weight, group)
        return layer

    def dequantize(self, dtype: torch.dtype, count: int | None = None) -> Tensor:
        """[count or out, in]"""
        packed, affine = self.weight[:count], self.scales_and_zeros[:, :count].to(dtype)
        q = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(dtype) - 8
        scale, zero = affine.repeat_interleave(self.group_size, dim=0)[: q.shape[1]].unbind(-1)
        return q * scale.T + zero.T

    def forward(self, x: Tensor, count: int | None = None) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype, count))

    def take_rows(self, rows: Tensor) -> "Int4Linear":
        taken = Int4Linear(2 * self.weight.shape[1], 0, self.group_size)
        taken.weight, taken.scales_and_zeros = self.weight[rows], self.scales_and_zeros[:, rows]
        return taken


AnyLinear = nn.Linear | PerChannelLinear | Int4Linear


def first_rows(layer: AnyLinear | CpuInt8Linear, x: Tensor, count: int) -> Tensor:
    """The first `count` outputs of a layer of any kind; the others are not computed."""
    return F.linear(x, layer.weight[:count]) if isinstance(layer, nn.Linear) else layer(x, count)


def take_rows(layer: AnyLinear, rows: Tensor) -> AnyLinear:
    """A layer of the same kind with only these outputs, in this order."""
    return dense(layer.weight.detach()[rows]) if isinstance(layer, nn.Linear) else layer.take_rows(rows)


def dense(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer over an existing weight [out, in], without a copy."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def quantize_rows(weight: Tensor, kind: torch.dtype, scale: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """[out, ...] -> the same shape in int8 or fp8, and scales [out] of type `scale`: w = q · scale."""
    wide = weight.detach().float().flatten(1)
    top = 127.0 if kind == torch.int8 else torch.finfo(kind).max
    # Rounded to what is stored before they are used: a row is nearest to w under the scale that undoes it.
    scales = (wide.abs().amax(1) / top).clamp_min(1e-12).to(scale)
    q = (wide / scales.float()[:, None]).clamp(-top, top)
    return (q.round() if kind == torch.int8 else q).to(kind).view(weight.shape), scales


def quantize_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """[out, in] -> bytes [out, in / 2] and scales with zeros [groups, out, 2]; the last group may be shorter."""
    columns = weight.shape[1]
    wide = weight.detach().float()
    # Padding repeats the last column, which moves neither end of its group.
    padded = torch.cat((wide, wide[:, -1:].expand(-1, -columns % group)), dim=1).unflatten(1, (-1, group))
    low, high = padded.amin(-1), padded.amax(-1)
    scales = ((high - low) / 15).clamp_min(1e-6).bfloat16().float()
    zeros = (low + 8 * scales).bfloat16().float()
    q = ((padded - zeros[..., None]) / scales[..., None] + 8).round().clamp(0, 15).to(torch.uint8)
    q = q.flatten(1)[:, :columns]
    affine = torch.stack((scales, zeros), dim=-1).transpose(0, 1).bfloat16().contiguous()
    return q[:, 0::2] | (q[:, 1::2] << 4), affine


def to_column_major(module: nn.Module) -> None:
    """Lay tall matrices out column by column, in place: on a CPU their products with few rows are a quarter faster.

    What is computed stays the same, to rounding.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.out_features > layer.in_features:
            layer.weight.data = layer.weight.data.t().contiguous().t()


def _rows(weight: Tensor, rows: Tensor) -> Tensor:
    """weight[rows] for types that cannot be indexed as well."""
    return weight.view(torch.uint8)[rows].view(weight.dtype)


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
