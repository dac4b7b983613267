"""A linear layer for few rows, with the norm before it and the gate or the sum behind it in the same pass.

A decode step reads every weight once for a handful of rows, so it is bound by memory; what these kernels save is the
trips of the small activations and the launches between them. Rounding is that of the separate operators: each
intermediate is rounded to the activations' type where the plain path would store it.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import jit, next_power_of_two, tl
from shoal.kernels.rms_norm import rms_norm


def linear_reference(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """x [rows, in] through weight [out, in]; optionally normed first, gated (weight holds gate and up) or added."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    y = F.linear(x, weight)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


@jit
def _linear_kernel(
    x,
    weight,
    norm,
    residual,
    out,
    rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = m[:, None] < rows
    wanted = n[:, None] < N
    kind = x.dtype.element_ty
    scale = tl.zeros((BLOCK_M,), tl.float32)
    if NORMED:
        # The rows are few and stay in cache, so every program reads them twice rather than wait for another kernel.
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            part = tl.load(x + m[:, None] * K + k[None, :], mask=here & (k[None, :] < K), other=0.0).to(tl.float32)
            scale += tl.sum(part * part, axis=1)
        scale = tl.rsqrt(scale / K + eps)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    raised = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k[None, :] < K
        part = tl.load(x + m[:, None] * K + k[None, :], mask=here & inside, other=0.0)
        if NORMED:
            part = (part.to(tl.float32) * scale[:, None]).to(kind)
            part = (part * tl.load(norm + k, mask=k < K, other=0.0)[None, :]).to(kind)
        w = tl.load(weight + n[:, None] * K + k[None, :], mask=wanted & inside, other=0.0)
        total = tl.dot(part, tl.trans(w), total, input_precision="ieee")
        if GATED:
            w = tl.load(weight + (n[:, None] + N) * K + k[None, :], mask=wanted & inside, other=0.0)
            raised = tl.dot(part, tl.trans(w), raised, input_precision="ieee")
    y = total.to(kind)
    if GATED:
        gate = y.to(tl.float32)
        y = ((gate / (1.0 + tl.exp(-gate))).to(kind) * raised.to(kind)).to(kind)
    place = m[:, None] * N + n[None, :]
    kept = here & (n[None, :] < N)
    if ADDED:
        y = (tl.load(residual + place, mask=kept, other=0.0) + y).to(kind)
    tl.store(out + place, y, mask=kept)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`linear_reference` in one launch. x is contiguous; `out` may be given, and may be `residual`."""
    rows, columns = x.shape
    width = len(weight) // 2 if gated else len(weight)
    if out is None:
        out = x.new_empty(rows, width)
    block_m, block_n, block_k = tile(rows, width, columns)
    grid = (-(-width // block_n), -(-rows // block_m))
    _linear_kernel[grid](
        x,
        weight,
        x if norm is None else norm,
        x if residual is None else residual,
        out,
        rows,
        eps,
        N=width,
        K=columns,
        NORMED=norm is not None,
        GATED=gated,
        ADDED=residual is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
    )
    return out


def tile(rows: int, width: int, columns: int) -> tuple[int, int, int]:
    """Block sizes. Narrow in `out`, so that even a small matrix keeps every multiprocessor reading."""
    block_m = min(max(16, next_power_of_two(rows)), 64)
    block_n = 16 if width <= 2048 else 32
    return block_m, block_n, min(128, max(16, next_power_of_two(columns)))
