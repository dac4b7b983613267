"""Root-mean-square norm with the rounding order of the released models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.kernels.jit import await_previous, kernel, next_power_of_two, runs_ahead, tl


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
    due,
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
        due_scale = tl.load(scales + d, mask=inside, other=0.0).to(tl.float32)
    if AHEAD:
        await_previous()
    here = tl.program_id(0) * DIM + d
    part = tl.load(x + here, mask=inside, other=0.0)
    if ADDED:
        size = rows * DIM
        first, second = tl.load(due + here, mask=inside), tl.load(due + size + here, mask=inside)
        third, fourth = tl.load(due + 2 * size + here, mask=inside), tl.load(due + 3 * size + here, mask=inside)
        total = ((first + second) + third) + fourth
        if SCALED:
            total *= due_scale
        part = (part + total.to(part.dtype)).to(part.dtype)
        tl.store(x + here, part, mask=inside)
    wide = tl.where(inside, part, 0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / DIM + eps)
    tl.store(out + here, (wide.to(part.dtype) * scale).to(part.dtype), mask=inside)


def normed(x: Tensor, weight: Tensor, eps: float, *, due: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    """`rms_norm` of rows x [n, dim] in one launch.

    What is `due`, quarters [4, n, dim] of a product (with scales [dim] if its weights have some), is added to x first.
    """
    rows, dim = x.shape
    out, ahead, padded = torch.empty_like(x), runs_ahead(x.device), next_power_of_two(dim)
    _norm_kernel[(rows,)](
        x,
        x if due is None else due,
        x if scales is None else scales,
        weight,
        out,
        eps,
        rows,
        DIM=dim,
        PADDED=padded,
        ADDED=due is not None,
        SCALED=scales is not None,
        AHEAD=ahead,
        num_warps=max(4 if due is None else 8, padded // 256),
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
