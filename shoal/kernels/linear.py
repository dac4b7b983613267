"""A linear layer for few rows, with the gate or the sum behind it in the same launch, and the norm before it.

A decode step reads every weight once for a handful of rows, so it is bound by memory, and between two layers by the
time from the end of one kernel to the first product of the next. Up to sixteen rows, a program therefore has its
weights at hand before it waits for its inputs. Rounding is that of the separate operators: each intermediate is
rounded to the activations' type where the plain path would store it.

A row comes to the same bits however many are computed with it: the columns are added up in quarters, each from its
first column to its last, and the quarters in order. This also lets four chains of products run side by side; where a
matrix has too few outputs to keep every multiprocessor reading, `kernels/quarters.py` gives each chain to a program of
its own.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.dequant import dequantize
from shoal.kernels.jit import (
    grid_dependency_wait,
    jit,
    kernel,
    launch_dependents,
    launch_dependents_and_wait,
    next_power_of_two,
    supports_pdl,
    tl,
)
from shoal.kernels.rms_norm import fused_rms_norm, rms_norm

# Rows that one program computes with its weights at hand before it waits.
FEW = 16
# The same with the product turned, the weights first: tensor cores take sixteen of what comes first and eight of what
# comes second, so up to eight rows are half the work.
SWAP_AB_ROWS = 8


def linear_reference(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """x [rows, in] through weight [out, in]; optionally normed first, gated (weight holds gate and up) or added.

    A weight in int8 or fp8 comes with scales [out].
    """
    if norm is not None:
        x = rms_norm(x, norm, eps)
    y = F.linear(x, weight) if scales is None else (F.linear(x, weight.to(x.dtype)).float() * scales).to(x.dtype)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


@jit
def _scales_of(scales, n, N, SCALED: tl.constexpr, GATED: tl.constexpr):
    """Of outputs n, and of those they gate. Loaded before there is anything to scale: nobody has to wait for them."""
    scale, raising = 1.0, 1.0
    if SCALED:
        scale = tl.load(scales + n, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            raising = tl.load(scales + n + N, mask=n < N, other=0.0).to(tl.float32)
    return scale, raising


@jit
def _finished(total, raised, scale, raising, residual, out, m, n, rows, N, SCALED, GATED, ADDED):
    """Scale, gate, add and store products [rows, columns]."""
    kind = out.dtype.element_ty
    if SCALED:
        total *= scale[None, :]
        if GATED:
            raised *= raising[None, :]
    y = total.to(kind)
    if GATED:
        gate = y.to(tl.float32)
        y = ((gate / (1.0 + tl.exp(-gate))).to(kind) * raised.to(kind)).to(kind)
    place = m[:, None] * N + n[None, :]
    kept = (m < rows)[:, None] & (n < N)[None, :]
    if ADDED:
        y = (tl.load(residual + place, mask=kept, other=0.0) + y).to(kind)
    tl.store(out + place, y, mask=kept)


@jit
def _multiplied(part, w, total, TURNED: tl.constexpr):
    """Quarters of inputs [4, rows, k] times those of weights [4, n, k]."""
    if TURNED:
        total = tl.dot(w, tl.permute(part, (0, 2, 1)), total, input_precision="ieee")
    else:
        total = tl.dot(part, tl.permute(w, (0, 2, 1)), total, input_precision="ieee")
    return total


@jit
def _added_up(parts, FIRST: tl.constexpr, SECOND: tl.constexpr, TURNED: tl.constexpr):
    """The sum of quarters [4, first, second], in order; [rows, n] either way."""
    pairs = tl.permute(tl.reshape(parts, (2, 2, FIRST, SECOND)), (2, 3, 0, 1))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    total = ((first + second) + third) + fourth
    if TURNED:
        total = tl.trans(total)
    return total


@kernel("rows")
def _few_kernel(
    x,
    weight,
    residual,
    scales,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    ONE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if ONE:
        rows = 1  # known when compiled, it saves registers, and so lets more programs run at once
    QUARTER: tl.constexpr = K // 4
    # A short row is in order before the wait; a long one has loads under way all the time.
    LONG: tl.constexpr = QUARTER > 8 * WIDE
    TURNED: tl.constexpr = ROWS == 8  # SWAP_AB_ROWS
    FIRST: tl.constexpr = BLOCK_N if TURNED else ROWS
    SECOND: tl.constexpr = ROWS if TURNED else BLOCK_N
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    quarter, k = tl.arange(0, 4) * QUARTER, tl.arange(0, WIDE)
    kind = x.dtype.element_ty
    columns = quarter[:, None, None] + k[None, None, :]
    there = weight + tl.minimum(n, N - 1)[None, :, None] * K + columns
    if AHEAD:
        launch_dependents()
    # The weights depend on nobody: they come while the kernel before is still at work.
    w = tl.load(there)
    if GATED:
        g = tl.load(there + N * K)
    if QUARTER > WIDE:
        w_next = tl.load(there + WIDE)
        if GATED:
            g_next = tl.load(there + N * K + WIDE)
    scale, raising = _scales_of(scales, n, N, SCALED, GATED)
    w = dequantize(w, kind, LONG, PINNED=not LONG)
    if GATED:
        g = dequantize(g, kind, LONG, PINNED=not LONG)
    if not LONG and QUARTER > WIDE:
        w_next = dequantize(w_next, kind, PINNED=True)
        if GATED:
            g_next = dequantize(g_next, kind, PINNED=True)
    if AHEAD:
        grid_dependency_wait()
    source = x + m[None, :, None] * K + columns
    here = (m < rows)[None, :, None]
    total = tl.zeros((4, FIRST, SECOND), tl.float32)
    raised = tl.zeros((4, FIRST, SECOND), tl.float32)
    following = tl.load(source, mask=here, other=0.0)
    for start in tl.static_range(0, QUARTER, WIDE):
        part = following
        if start + WIDE < QUARTER:
            following = tl.load(source + start + WIDE, mask=here, other=0.0)
            w_used, w = w, w_next
            if GATED:
                g_used, g = g, g_next
        else:
            w_used = w
            if GATED:
                g_used = g
        if start + 2 * WIDE < QUARTER:
            w_next = tl.load(there + start + 2 * WIDE)
            if GATED:
                g_next = tl.load(there + N * K + start + 2 * WIDE)
        part = dequantize(part, kind, HERE=True)
        total = _multiplied(part, w_used, total, TURNED)
        if GATED:
            raised = _multiplied(part, g_used, raised, TURNED)
        if start + WIDE < QUARTER:
            w = dequantize(w, kind, LONG)
            if GATED:
                g = dequantize(g, kind, LONG)
    total, raised = _added_up(total, FIRST, SECOND, TURNED), _added_up(raised, FIRST, SECOND, TURNED)
    _finished(total, raised, scale, raising, residual, out, m, n, rows, N, SCALED, GATED, ADDED)


@kernel("rows")
def _many_kernel(
    x,
    weight,
    residual,
    scales,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):
    PART: tl.constexpr = K // PARTS
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    scale, raising = _scales_of(scales, n, N, SCALED, GATED)
    if AHEAD:
        launch_dependents_and_wait()
    here, wanted = (m < rows)[:, None], (n < N)[:, None]
    kind = x.dtype.element_ty
    total_0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total_1, total_2, total_3 = total_0, total_0, total_0
    raised_0, raised_1, raised_2, raised_3 = total_0, total_0, total_0, total_0
    for start in range(0, PART, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < PART)[None, :] if PART % BLOCK_K else (k >= 0)[None, :]
        source, there = x + m[:, None] * K + k[None, :], weight + n[:, None] * K + k[None, :]
        part = tl.load(source, mask=here & inside, other=0.0)
        total_0 = product(part, there, wanted & inside, total_0, kind)
        if GATED:
            raised_0 = product(part, there + N * K, wanted & inside, raised_0, kind)
        if PARTS == 4:
            part = tl.load(source + PART, mask=here & inside, other=0.0)
            total_1 = product(part, there + PART, wanted & inside, total_1, kind)
            if GATED:
                raised_1 = product(part, there + N * K + PART, wanted & inside, raised_1, kind)
            part = tl.load(source + 2 * PART, mask=here & inside, other=0.0)
            total_2 = product(part, there + 2 * PART, wanted & inside, total_2, kind)
            if GATED:
                raised_2 = product(part, there + N * K + 2 * PART, wanted & inside, raised_2, kind)
            part = tl.load(source + 3 * PART, mask=here & inside, other=0.0)
            total_3 = product(part, there + 3 * PART, wanted & inside, total_3, kind)
            if GATED:
                raised_3 = product(part, there + N * K + 3 * PART, wanted & inside, raised_3, kind)
    total, raised = ((total_0 + total_1) + total_2) + total_3, ((raised_0 + raised_1) + raised_2) + raised_3
    _finished(total, raised, scale, raising, residual, out, m, n, rows, N, SCALED, GATED, ADDED)


@jit
def product(part, weights, mask, total, kind: tl.constexpr):
    w = dequantize(tl.load(weights, mask=mask, other=0.0), kind)
    return tl.dot(part, tl.trans(w), total, input_precision="ieee")


class Tile(NamedTuple):
    """How the work of one product is cut up."""

    rows: int
    width: int
    columns: int  # per quarter
    warps: int = 4
    stages: int = 3


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    scales: Tensor | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`linear_reference` in one launch, or two with a norm. x is contiguous; `out` may be given, and be `residual`."""
    if norm is not None:
        x = fused_rms_norm(x, norm, eps)
    rows, columns = x.shape
    width = len(weight) // 2 if gated else len(weight)
    if out is None:
        out = x.new_empty(rows, width)
    parts = 4 if columns % 128 == 0 else 1
    tile = tile or choose_tile(rows, width, columns // parts, gated=gated, small=weight.element_size() == 1)
    few = tile.rows <= FEW and parts == 4 and columns // parts % tile.columns == 0
    ahead = supports_pdl(x.device)
    grid = (-(-width // tile.width), -(-rows // tile.rows))
    arguments = (
        x,
        weight,
        x if residual is None else residual,
        x if scales is None else scales,
        out,
        rows,
    )
    form = {"SCALED": scales is not None, "GATED": gated, "ADDED": residual is not None, "AHEAD": ahead}
    how = {"BLOCK_N": tile.width, "num_warps": tile.warps, "launch_pdl": ahead}
    if few:
        sizes = {"ROWS": tile.rows, "WIDE": tile.columns, "ONE": rows == 1}
        _few_kernel[grid](*arguments, N=width, K=columns, **form, **sizes, **how)
    else:
        sizes = {"PARTS": parts, "BLOCK_M": tile.rows, "BLOCK_K": tile.columns, "num_stages": tile.stages}
        _many_kernel[grid](*arguments, N=width, K=columns, **form, **sizes, **how)
    return out


def choose_tile(rows: int, width: int, part: int, *, gated: bool, small: bool) -> Tile:
    """For so many rows and outputs, and columns per quarter: what was fastest on an H200 at the released sizes.

    `small` weights are bytes.
    """
    if rows <= FEW:
        return _few_tile(rows, part, gated=gated, small=small)
    # At least two steps per quarter: a loop of one is unrolled, and the compiler then chains the quarters.
    block_k = min(64, max(16, next_power_of_two(part) // 2))
    if rows > 64:
        return Tile(64, 32 if gated else 64, block_k)
    if width <= 2048:
        return Tile(64, 16, block_k, stages=4)
    return Tile(64, 32 if gated or width <= 4096 else 64, block_k)


def _few_tile(rows: int, part: int, *, gated: bool, small: bool) -> Tile:
    turned = rows <= SWAP_AB_ROWS and (small or part <= 512)
    if turned and small:
        width, widest = (16, 64 if gated else 128) if part > 512 else (16 if gated else 32, 128)
    elif turned:
        width, widest = 16 if gated and rows > 1 else 32, 256
    else:
        widest = 256 if not gated and part in (512, 768, 1024) else 64 if part > 512 else 128
        width = 16 if gated or widest == 256 else 32
    wide = next((size for size in (256, 128, 64, 32) if size <= widest and part % size == 0), 16)
    return Tile(SWAP_AB_ROWS if turned else FEW, width, wide)
