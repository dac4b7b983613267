"""A linear layer in four parts, quarters of its columns, each by programs of its own; the next norm adds them up.

A matrix with few outputs has too few programs to keep every multiprocessor reading; four times as many do. Added up in
order the quarters are what `linear` comes to, bit for bit.
"""

from __future__ import annotations

import torch
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
from shoal.kernels.linear import FEW, SWAP_AB_ROWS, Tile, product


def split_k_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] through weight [out, in], each quarter of the columns by itself: [4, rows, out] in fp32."""
    pairs = zip(x.chunk(4, dim=1), weight.to(x.dtype).chunk(4, dim=1), strict=True)
    return torch.stack([F.linear(part.float(), its.float()) for part, its in pairs])


@kernel("rows")
def _few_quarters_kernel(
    x,
    weight,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    ONE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if ONE:
        rows = 1
    QUARTER: tl.constexpr = K // 4
    LONG: tl.constexpr = QUARTER > 8 * WIDE
    TURNED: tl.constexpr = ROWS == 8  # SWAP_AB_ROWS
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, WIDE)
    kind = x.dtype.element_ty
    there = weight + tl.minimum(n, N - 1)[:, None] * K + tl.program_id(2) * QUARTER + k[None, :]
    if AHEAD:
        launch_dependents()
    w = _columns_from(there, k, 0, QUARTER, WIDE)
    if QUARTER > WIDE:
        w_next = _columns_from(there, k, WIDE, QUARTER, WIDE)
    if QUARTER > 2 * WIDE:
        w_third = _columns_from(there, k, 2 * WIDE, QUARTER, WIDE)
    w = dequantize(w, kind, LONG, PINNED=not LONG)
    if not LONG and QUARTER > WIDE:
        w_next = dequantize(w_next, kind, PINNED=True)
    if not LONG and QUARTER > 2 * WIDE:
        w_third = dequantize(w_third, kind, PINNED=True)
    if AHEAD:
        grid_dependency_wait()
    source = x + m[:, None] * K + tl.program_id(2) * QUARTER + k[None, :]
    here = (m < rows)[:, None]
    total = tl.zeros((BLOCK_N, ROWS) if TURNED else (ROWS, BLOCK_N), tl.float32)
    part = tl.load(source, mask=here & (k < QUARTER)[None, :], other=0.0)
    if QUARTER > WIDE:
        part_next = tl.load(source + WIDE, mask=here & (k < QUARTER - WIDE)[None, :], other=0.0)
    for start in tl.static_range(0, QUARTER, WIDE):
        part_used, w_used = part, w
        if start + WIDE < QUARTER:
            part, w = part_next, w_next
        if start + 2 * WIDE < QUARTER:
            left = (k < QUARTER - start - 2 * WIDE)[None, :]
            part_next = tl.load(source + start + 2 * WIDE, mask=here & left, other=0.0)
            w_next = w_third
        if start + 3 * WIDE < QUARTER:
            w_third = _columns_from(there, k, start + 3 * WIDE, QUARTER, WIDE)
        part_used = dequantize(part_used, kind, HERE=True)
        if TURNED:
            total = tl.dot(w_used, tl.trans(part_used), total, input_precision="ieee")
        else:
            total = tl.dot(part_used, tl.trans(w_used), total, input_precision="ieee")
        if start + WIDE < QUARTER:
            w = dequantize(w, kind, LONG)
    if TURNED:
        total = tl.trans(total)
    _store_quarter(total, out, m, n, rows, N)


@jit
def _columns_from(there, k, start: tl.constexpr, QUARTER: tl.constexpr, WIDE: tl.constexpr):
    """Weights from a column on, zero where the quarter has ended."""
    if start + WIDE <= QUARTER:
        w = tl.load(there + start)
    else:
        w = tl.load(there + start, mask=(k < QUARTER - start)[None, :], other=0.0)
    return w


@kernel("rows")
def _many_quarters_kernel(
    x,
    weight,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):
    QUARTER: tl.constexpr = K // 4
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if AHEAD:
        launch_dependents_and_wait()
    kind = x.dtype.element_ty
    source = x + m[:, None] * K + tl.program_id(2) * QUARTER
    there = weight + n[:, None] * K + tl.program_id(2) * QUARTER
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, QUARTER, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        inside = k < QUARTER if QUARTER % BLOCK_K else k >= 0
        part = tl.load(source + k, mask=(m < rows)[:, None] & inside, other=0.0)
        total = product(part, there + k, (n < N)[:, None] & inside, total, kind)
    _store_quarter(total, out, m, n, rows, N)


@jit
def _store_quarter(total, out, m, n, rows, N: tl.constexpr):
    place = (tl.program_id(2) * rows + m)[:, None] * N + n[None, :]
    tl.store(out + place, total, mask=(m < rows)[:, None] & (n < N)[None, :])


def split_k_linear(x: Tensor, weight: Tensor, *, tile: Tile | None = None) -> Tensor:
    """Compute `split_k_linear_reference` in one launch. K must be a multiple of 128."""
    (rows, columns), width = x.shape, len(weight)
    out = torch.empty(4, rows, width, dtype=torch.float32, device=x.device)
    tile = tile or choose_tile(rows, width, columns // 4, small=weight.element_size() == 1)
    grid = (-(-width // tile.width), -(-rows // tile.rows), 4)
    ahead = supports_pdl(x.device)
    form = {"N": width, "K": columns, "BLOCK_N": tile.width, "AHEAD": ahead, "num_warps": tile.warps}
    if tile.rows <= FEW:
        sizes = {"ROWS": tile.rows, "WIDE": tile.columns, "ONE": rows == 1}
        _few_quarters_kernel[grid](x, weight, out, rows, **sizes, **form, launch_pdl=ahead)
    else:
        sizes = {"BLOCK_M": tile.rows, "BLOCK_K": tile.columns, "num_stages": tile.stages}
        _many_quarters_kernel[grid](x, weight, out, rows, **sizes, **form, launch_pdl=ahead)
    return out


def choose_tile(rows: int, width: int, part: int, *, small: bool) -> Tile:
    if rows <= FEW:
        wide, turned = min(256, next_power_of_two(part)), rows <= SWAP_AB_ROWS and (small or part < 1024)
        if small and turned:
            return Tile(SWAP_AB_ROWS, 32, wide, warps=4 if part <= 256 else 2)
        return Tile(SWAP_AB_ROWS if turned else FEW, 64 if width <= 1024 else 32, wide)
    block_k = min(128, max(16, next_power_of_two(part) // 2))
    return Tile(64, 16, block_k, stages=4) if width <= 1024 else Tile(64, 32, block_k)
