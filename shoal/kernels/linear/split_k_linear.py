"""Split-K linear: K is split four ways over separate programs, and the next RMSNorm reduces the partial sums.

A layer with few outputs has too few programs to saturate memory bandwidth; split-K has four times as many. The partial
sums are added in the same order as in `linear`, so results are bit-identical.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.dequant import dequantize
from shoal.kernels.int8_rows import Int8Rows
from shoal.kernels.jit import (
    HOPPER_SHARED_MEMORY,
    grid_dependency_wait,
    jit,
    kernel,
    launch_dependents,
    launch_dependents_and_wait,
    next_power_of_two,
    shared_memory_limit,
    supports_pdl,
    tl,
)
from shoal.kernels.linear.int8_tiles import int8_split_k_tile
from shoal.kernels.linear.linear import dequant_dot, needs_regroup, regroup
from shoal.kernels.linear.tiles import few_rows
from shoal.kernels.linear.waves import card_width
from shoal.kernels.tile import NARROW, SMALL_M, SWAP_AB_ROWS, Tile

SPLIT_K = 4


def split_k_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [rows, in] by weight [out, in] per K split: partial sums [4, rows, out] in fp32."""
    splits = zip(x.chunk(SPLIT_K, dim=1), weight.to(x.dtype).chunk(SPLIT_K, dim=1), strict=True)
    return torch.stack([F.linear(x_split.float(), w_split.float()) for x_split, w_split in splits])


@kernel("rows")
def _small_m_split_k_kernel(
    x,
    weight,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SINGLE_ROW: tl.constexpr,
    REGROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if SINGLE_ROW:
        rows = 1
    K_SPLIT: tl.constexpr = K // 4
    LONG_K: tl.constexpr = K_SPLIT > 8 * BLOCK_K
    VOLATILE: tl.constexpr = LONG_K and (REGROUP or weight.dtype.element_ty == x.dtype.element_ty)  # as in `linear`
    GROUPED: tl.constexpr = REGROUP and not (VOLATILE and x.dtype.element_ty == tl.bfloat16)
    SWAP_AB: tl.constexpr = BLOCK_M == 8  # SWAP_AB_ROWS
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    dtype = x.dtype.element_ty
    w_ptrs = weight + tl.minimum(n, N - 1)[:, None] * K + tl.program_id(2) * K_SPLIT + k[None, :]
    if PDL:
        launch_dependents()
    w = _load_weights(w_ptrs, k, 0, K_SPLIT, BLOCK_K)
    if K_SPLIT > BLOCK_K:
        w_next = _load_weights(w_ptrs, k, BLOCK_K, K_SPLIT, BLOCK_K)
    if K_SPLIT > 2 * BLOCK_K:
        w_third = _load_weights(w_ptrs, k, 2 * BLOCK_K, K_SPLIT, BLOCK_K)
    w = dequantize(w, dtype, VOLATILE, PINNED=not LONG_K)
    if not LONG_K and K_SPLIT > BLOCK_K:
        w_next = dequantize(w_next, dtype, PINNED=True)
    if not LONG_K and K_SPLIT > 2 * BLOCK_K:
        w_third = dequantize(w_third, dtype, PINNED=True)
    if PDL:
        grid_dependency_wait()
    x_ptrs = x + m[:, None] * K + tl.program_id(2) * K_SPLIT + k[None, :]
    row_mask = (m < rows)[:, None]
    shape: tl.constexpr = (BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N)
    acc = tl.zeros(shape, tl.int32 if dtype == tl.int8 else tl.float32)
    x_tile = tl.load(x_ptrs, mask=row_mask & (k < K_SPLIT)[None, :], other=0.0)
    if K_SPLIT > BLOCK_K:
        x_next = tl.load(x_ptrs + BLOCK_K, mask=row_mask & (k < K_SPLIT - BLOCK_K)[None, :], other=0.0)
    for start in tl.static_range(0, K_SPLIT, BLOCK_K):
        x_used, w_used = x_tile, w
        if start + BLOCK_K < K_SPLIT:
            x_tile, w = x_next, w_next
        if start + 2 * BLOCK_K < K_SPLIT:
            k_mask = (k < K_SPLIT - start - 2 * BLOCK_K)[None, :]
            x_next = tl.load(x_ptrs + start + 2 * BLOCK_K, mask=row_mask & k_mask, other=0.0)
            w_next = w_third
        if start + 3 * BLOCK_K < K_SPLIT:
            w_third = _load_weights(w_ptrs, k, start + 3 * BLOCK_K, K_SPLIT, BLOCK_K)
        x_used = dequantize(x_used, dtype, VOLATILE=True)
        if GROUPED:
            x_used, w_used = regroup(x_used), regroup(w_used)
        if SWAP_AB:
            acc = tl.dot(w_used, tl.trans(x_used), acc, input_precision="ieee", out_dtype=acc.dtype)
        else:
            acc = tl.dot(x_used, tl.trans(w_used), acc, input_precision="ieee", out_dtype=acc.dtype)
        if start + BLOCK_K < K_SPLIT:
            w = dequantize(w, dtype, VOLATILE)
    if SWAP_AB:
        acc = tl.trans(acc)
    _store_partial(acc, out, m, n, rows, N)


@jit
def _load_weights(w_ptrs, k, start: tl.constexpr, K_SPLIT: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K weights per row from `start` on, zero beyond the end of the split."""
    if start + BLOCK_K <= K_SPLIT:
        w = tl.load(w_ptrs + start)
    else:
        w = tl.load(w_ptrs + start, mask=(k < K_SPLIT - start)[None, :], other=0.0)
    return w


@kernel("rows")
def _large_m_split_k_kernel(
    x,
    weight,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    K_SPLIT: tl.constexpr = K // 4
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        launch_dependents_and_wait()
    dtype = x.dtype.element_ty
    x_ptrs = x + m[:, None] * K + tl.program_id(2) * K_SPLIT
    w_ptrs = weight + n[:, None] * K + tl.program_id(2) * K_SPLIT
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if dtype == tl.int8 else tl.float32)
    for start in range(0, K_SPLIT, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        k_mask = k < K_SPLIT if K_SPLIT % BLOCK_K else k >= 0
        x_tile = tl.load(x_ptrs + k, mask=(m < rows)[:, None] & k_mask, other=0.0)
        acc = dequant_dot(x_tile, w_ptrs + k, (n < N)[:, None] & k_mask, acc, dtype)
    _store_partial(acc, out, m, n, rows, N)


@kernel("rows", "k_steps")
def _even_split_k_kernel(
    x,
    weight,
    out,
    rows,
    k_steps,
    N: tl.constexpr,
    K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Rows, outputs and splits are multiples of the tile, so no load needs a mask. Programs that share weights run
    # next to each other, so that the weights are read once.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(2) * (K // 4) + tl.arange(0, BLOCK_K)
    dtype = x.dtype.element_ty
    x_ptrs, w_ptrs = x + m[:, None] * K + k[None, :], weight + n[:, None] * K + k[None, :]
    if PDL:
        launch_dependents_and_wait()
    shape: tl.constexpr = (BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N)
    acc = tl.zeros(shape, tl.int32 if dtype == tl.int8 else tl.float32)
    for step in range(0, k_steps):  # K // 4 // BLOCK_K; a constant would be unrolled
        x_tile = tl.load(x_ptrs + step * BLOCK_K)
        w = dequantize(tl.load(w_ptrs + step * BLOCK_K), dtype)
        if SWAP_AB:
            acc = tl.dot(w, tl.trans(x_tile), acc, input_precision="ieee", out_dtype=acc.dtype)
        else:
            acc = tl.dot(x_tile, tl.trans(w), acc, input_precision="ieee", out_dtype=acc.dtype)
    if SWAP_AB:
        acc = tl.trans(acc)
    _store_partial(acc, out, m, n, rows, N)


@jit
def _store_partial(acc, out, m, n, rows, N: tl.constexpr):
    offset = (tl.program_id(2) * rows + m)[:, None] * N + n[None, :]
    tl.store(out + offset, acc, mask=(m < rows)[:, None] & (n < N)[None, :])


def split_k_linear(x: Tensor | Int8Rows, weight: Tensor, *, tile: Tile | None = None) -> Tensor:
    """Compute `split_k_linear_reference` in one launch. K must be a multiple of 128.

    Partial sums of int8 rows are int32, without the scales of the rows.
    """
    x = x.values if isinstance(x, Int8Rows) else x
    (rows, k), n, quantized = x.shape, len(weight), weight.element_size() == 1
    dtype = torch.int32 if x.dtype == torch.int8 else torch.float32
    partials = torch.empty(SPLIT_K, rows, n, dtype=dtype, device=x.device)
    shared_limit = shared_memory_limit(x.device)
    if tile is None and x.dtype == torch.int8:
        tile = int8_split_k_tile(rows, n, k // SPLIT_K, shared_limit)
    elif tile is None:
        tile = choose_tile(rows, n, k // SPLIT_K, quantized=quantized, dtype=x.dtype, shared_limit=shared_limit)
        others = SPLIT_K * -(-rows // tile.block_m)
        tile = tile._replace(block_n=card_width(tile.block_n, n, others, x.device))
    grid = (-(-n // tile.block_n), -(-rows // tile.block_m), SPLIT_K)
    pdl = supports_pdl(x.device)
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    options = {"N": n, "K": k, "PDL": pdl, "num_warps": tile.warps, "launch_pdl": pdl}
    if tile.block_m <= SMALL_M:
        options |= {"SINGLE_ROW": rows == 1, "REGROUP": needs_regroup(x, weight, tile.block_k)}
        _small_m_split_k_kernel[grid](x, weight, partials, rows, **blocks, **options)
    elif is_even(rows, n, k // SPLIT_K, tile):
        # wgmma takes dequantized weights from registers only as operand A, of at least 64 rows. Narrow layers are
        # faster without swap-AB.
        wide = n > NARROW // 2 and tile.block_n >= 64
        swap_ab, steps = quantized and dtype == torch.float32 and wide, k // SPLIT_K // tile.block_k
        options |= {"SWAP_AB": swap_ab, "num_stages": tile.stages}
        _even_split_k_kernel[grid[1], grid[0], SPLIT_K](x, weight, partials, rows, steps, **blocks, **options)
    else:
        _large_m_split_k_kernel[grid](x, weight, partials, rows, num_stages=tile.stages, **blocks, **options)
    return partials


def choose_tile(rows: int, n: int, k_split: int, *, quantized: bool, dtype: torch.dtype, shared_limit: int) -> Tile:
    """Return the fastest tile on an H200 at the released sizes, reduced to `shared_limit` bytes if necessary.

    See `tiles.choose_tile` for the arguments.
    """
    if rows <= few_rows(n, k_split, quantized=quantized):
        swap_ab = rows <= SWAP_AB_ROWS and (quantized or k_split < 1024)
        block_k = min(256, next_power_of_two(k_split))
        if quantized and swap_ab:
            return Tile(SWAP_AB_ROWS, 32, block_k, warps=4 if k_split <= 256 else 2)
        block_n = 64 if n <= 1024 else 32
        # Up to three weight blocks are prefetched.
        buffer = block_k * dtype.itemsize * (SWAP_AB_ROWS + min(3, -(-k_split // block_k)) * block_n)
        if swap_ab and buffer > shared_limit:
            block_n = 32
        return Tile(SWAP_AB_ROWS if swap_ab else SMALL_M, block_n, block_k)
    if shared_limit >= HOPPER_SHARED_MEMORY and dtype.itemsize == 2:  # tiles measured on Hopper only
        tile = _many_rows_tile(rows, n, quantized=quantized)
        if is_even(rows, n, k_split, tile):
            return tile
    block_k = min(128, max(16, next_power_of_two(k_split) // 2))
    return Tile(64, 16, block_k, stages=4) if n <= 1024 else Tile(64, 32, block_k)


def is_even(rows: int, n: int, k_split: int, tile: Tile) -> bool:
    """Return whether more than 64 rows, all outputs and a split consist of whole tiles."""
    return rows > 64 and not (rows % tile.block_m or n % tile.block_n or k_split % tile.block_k)


def _many_rows_tile(rows: int, n: int, *, quantized: bool) -> Tile:
    if quantized:
        return Tile(64, 32 if n <= 1024 and rows <= 128 else 64, 128)
    if n <= 1024:
        return Tile(64, 64, 128) if rows <= 256 else Tile(64, 128, 64, stages=4)
    return Tile(64, 128, 64, stages=4) if rows <= 128 else Tile(128, 64, 64, warps=8, stages=4)
