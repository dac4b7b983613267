"""RMSNorm with the rounding order of the released models, and a fused add + RMSNorm kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.kernels.int8_rows import Int8Rows, quantize_row
from shoal.kernels.jit import kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last axis in fp32, round to x's dtype, then scale: the order decides the last bit in bf16."""
    if x.dtype == torch.float32 and not x.is_cuda:
        # One operator with the same bits: on a CPU, operator overhead dominates a small step.
        return F.rms_norm(x, weight.shape, weight, eps)
    # Without a weight the operator computes in fp32 and rounds once, which replaces seven operators.
    return F.rms_norm(x, weight.shape, None, eps) * weight


@kernel("rows")
def _norm_kernel(
    x,
    partials,
    scales,
    row_scales,
    weight,
    out,
    out_scales,
    eps,
    rows,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_PARTIALS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    d = tl.arange(0, PADDED)
    mask = d < DIM
    norm_weight = tl.load(weight + d, mask=mask, other=0.0)
    if HAS_SCALES:
        scale = tl.load(scales + d, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        launch_dependents_and_wait()
    offset = tl.program_id(0) * DIM + d
    row = tl.load(x + offset, mask=mask, other=0.0)
    if HAS_PARTIALS:
        size = rows * DIM
        first = tl.load(partials + offset, mask=mask)
        second = tl.load(partials + size + offset, mask=mask)
        third = tl.load(partials + 2 * size + offset, mask=mask)
        fourth = tl.load(partials + 3 * size + offset, mask=mask)
        total = ((first + second) + third) + fourth  # the order of `linear`
        if total.dtype == tl.int32:
            total = total.to(tl.float32) * tl.load(row_scales + tl.program_id(0))
        if HAS_SCALES:
            total *= scale
        row = (row + total.to(row.dtype)).to(row.dtype)
        tl.store(x + offset, row, mask=mask)
    wide = tl.where(mask, row, 0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / DIM + eps)
    normed = (wide.to(row.dtype) * norm_weight).to(row.dtype)
    if out.dtype.element_ty == tl.int8:
        normed, out_scale = quantize_row(normed.to(tl.float32))
        tl.store(out_scales + tl.program_id(0), out_scale)
    tl.store(out + offset, normed, mask=mask)


def fused_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    partials: Tensor | None = None,
    scales: Tensor | None = None,
    row_scales: Tensor | None = None,
) -> Tensor:
    """Compute `rms_norm` of rows x [n, dim] in one launch.

    `partials` [4, n, dim] are the outputs of `split_k_linear`, still without the scales [dim] of a quantized weight
    and the scales [n] of int8 rows. They are reduced and added to x in place before the norm.
    """
    out = torch.empty_like(x)
    _launch(x, weight, eps, out, x, partials, scales, row_scales)
    return out


def int8_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    partials: Tensor | None = None,
    scales: Tensor | None = None,
    row_scales: Tensor | None = None,
) -> Int8Rows:
    """Compute `fused_rms_norm` and quantize its rows, in one launch."""
    out = Int8Rows.empty_like(x)
    _launch(x, weight, eps, out.values, out.scales, partials, scales, row_scales)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    out_scales: Tensor,
    partials: Tensor | None,
    scales: Tensor | None,
    row_scales: Tensor | None,
) -> None:
    (rows, dim), pdl = x.shape, supports_pdl(x.device)
    padded = next_power_of_two(dim)
    _norm_kernel[(rows,)](
        x,
        x if partials is None else partials,
        x if scales is None else scales,
        x if row_scales is None else row_scales,
        weight,
        out,
        out_scales,
        eps,
        rows,
        DIM=dim,
        PADDED=padded,
        HAS_PARTIALS=partials is not None,
        HAS_SCALES=scales is not None,
        PDL=pdl,
        # The number of warps decides the order of the sum of squares, so it does not depend on `partials`.
        num_warps=max(8, padded // 256),
        launch_pdl=pdl,
    )


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
