"""Root-mean-square norm with the rounding order of the released models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.kernels.jit import kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in fp32, round to x's dtype, then scale: the order decides the last bit in bf16."""
    if x.dtype == torch.float32 and not x.is_cuda:
        # The same bits as one operator: on a CPU a small step is mostly the cost of calling operators.
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


@kernel("rows")
def _norm_kernel(
    x,
    partials,
    scales,
    weight,
    out,
    eps,
    rows,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ADDED: tl.constexpr,
    SCALED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    d = tl.arange(0, PADDED)
    inside = d < DIM
    scale = tl.load(weight + d, mask=inside, other=0.0)
    if SCALED:
        partials_scale = tl.load(scales + d, mask=inside, other=0.0).to(tl.float32)
    if AHEAD:
        launch_dependents_and_wait()
    here = tl.program_id(0) * DIM + d
    part = tl.load(x + here, mask=inside, other=0.0)
    if ADDED:
        size = rows * DIM
        first, second = tl.load(partials + here, mask=inside), tl.load(partials + size + here, mask=inside)
        third, fourth = (
            tl.load(partials + 2 * size + here, mask=inside),
            tl.load(partials + 3 * size + here, mask=inside),
        )
        total = ((first + second) + third) + fourth
        if SCALED:
            total *= partials_scale
        part = (part + total.to(part.dtype)).to(part.dtype)
        tl.store(x + here, part, mask=inside)
    wide = tl.where(inside, part, 0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / DIM + eps)
    tl.store(out + here, (wide.to(part.dtype) * scale).to(part.dtype), mask=inside)


def fused_rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, partials: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """Compute `rms_norm` of rows x [n, dim] in one launch.

    `partials` [4, n, dim] in fp32 are the outputs of `split_k_linear`, still without the scales [dim] of a quantized
    weight. They are reduced and added to x in place before the norm.
    """
    rows, dim = x.shape
    out, ahead, padded = torch.empty_like(x), supports_pdl(x.device), next_power_of_two(dim)
    _norm_kernel[(rows,)](
        x,
        x if partials is None else partials,
        x if scales is None else scales,
        weight,
        out,
        eps,
        rows,
        DIM=dim,
        PADDED=padded,
        ADDED=partials is not None,
        SCALED=scales is not None,
        AHEAD=ahead,
        num_warps=max(4 if partials is None else 8, padded // 256),
        launch_pdl=ahead,
    )
    return out


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
