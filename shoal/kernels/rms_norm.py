"""Root-mean-square norm with the rounding order of the released models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.kernels.jit import await_previous, jit, next_power_of_two, runs_ahead, tl


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in fp32, round to x's dtype, then scale: the order decides the last bit in bf16."""
    if x.dtype == torch.float32 and not x.is_cuda:
        # The same bits as one operator: on a CPU a small step is mostly the cost of calling operators.
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


@jit
def _norm_kernel(x, weight, out, eps, DIM: tl.constexpr, PADDED: tl.constexpr, AHEAD: tl.constexpr):
    d = tl.arange(0, PADDED)
    inside = d < DIM
    scale = tl.load(weight + d, mask=inside, other=0.0)
    if AHEAD:
        await_previous()
    row = tl.program_id(0) * DIM
    part = tl.load(x + row + d, mask=inside, other=0.0)
    wide = part.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / DIM + eps)
    tl.store(out + row + d, (wide.to(part.dtype) * scale).to(part.dtype), mask=inside)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of rows x [n, dim] in one launch."""
    rows, dim = x.shape
    out, ahead = torch.empty_like(x), runs_ahead(x.device)
    _norm_kernel[(rows,)](
        x,
        weight,
        out,
        eps,
        DIM=dim,
        PADDED=next_power_of_two(dim),
        AHEAD=ahead,
        num_warps=4,
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
