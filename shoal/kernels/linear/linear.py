"""Linear layer with optional fused RMSNorm, SwiGLU gate, dequantization and residual add.

A decode step reads every weight once for a handful of rows. It is bound by memory bandwidth and, between layers, by the
latency from the end of one kernel to the first dot of the next. For up to SMALL_M rows a program therefore loads its
weights before it waits for its inputs (PDL). Rounding matches the separate operators: every intermediate is rounded to
the activation dtype where the plain path would store it.

Results are batch invariant: a row has the same bits for any number of rows. K is split in four, each split is
accumulated from its first to its last element, and the four sums are added in order. For few rows this also gives four
independent chains of dots per program; for many rows the splits follow each other in one accumulator, which leaves room
for larger tiles. Where a layer has too few outputs to fill the GPU, `linear/split_k_linear.py` gives each split a
program of its own (split-K).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.dequant import dequantize
from shoal.kernels.int8_rows import Int8Rows
from shoal.kernels.jit import (
    grid_dependency_wait,
    has_wgmma,
    jit,
    kernel,
    launch_dependents,
    launch_dependents_and_wait,
    shared_memory_limit,
    supports_pdl,
    tl,
)
from shoal.kernels.linear.int8_tiles import int8_tile
from shoal.kernels.linear.tiles import choose_tile
from shoal.kernels.linear.waves import card_width
from shoal.kernels.rms_norm import fused_rms_norm, rms_norm
from shoal.kernels.tile import SMALL_M, Tile


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
    """Multiply x [rows, in] by weight [out, in], optionally with RMSNorm before and gate or residual after.

    With `gated`, weight holds the gate and the up projection, one below the other. An int8 or fp8 weight has scales
    [out].
    """
    if norm is not None:
        x = rms_norm(x, norm, eps)
    y = F.linear(x, weight) if scales is None else (F.linear(x, weight.to(x.dtype)).float() * scales).to(x.dtype)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


@jit
def _load_scales(scales, n, N, HAS_SCALES: tl.constexpr, GATED: tl.constexpr):
    """Load the scales of outputs n and of their up projections; called early to hide the latency."""
    scale, up_scale = 1.0, 1.0
    if HAS_SCALES:
        scale = tl.load(scales + n, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            up_scale = tl.load(scales + n + N, mask=n < N, other=0.0).to(tl.float32)
    return scale, up_scale


@jit
def _epilogue(acc, acc_up, scale, up_scale, row_scales, residual, out, m, n, rows, N, HAS_SCALES, GATED, HAS_RESIDUAL):
    """Scale, gate, add the residual and store accumulators [BLOCK_M, BLOCK_N]."""
    dtype = out.dtype.element_ty
    if acc.dtype == tl.int32:  # sums of int8 activations
        row_scale = tl.load(row_scales + m, mask=m < rows, other=0.0)[:, None]
        acc, acc_up = acc.to(tl.float32) * row_scale, acc_up.to(tl.float32) * row_scale
    if HAS_SCALES:
        acc *= scale[None, :]
        if GATED:
            acc_up *= up_scale[None, :]
    y = acc.to(dtype)
    if GATED:
        gate = y.to(tl.float32)
        y = ((gate / (1.0 + tl.exp(-gate))).to(dtype) * acc_up.to(dtype)).to(dtype)
    offset = m[:, None] * N + n[None, :]
    mask = (m < rows)[:, None] & (n < N)[None, :]
    if HAS_RESIDUAL:
        y = (tl.load(residual + offset, mask=mask, other=0.0) + y).to(dtype)
    tl.store(out + offset, y, mask=mask)


@jit
def regroup(tile):
    """Swap bits 1 and 4 of the last index of tile [..., K].

    With 8-bit weights, the compiler gives an mma instruction elements 0, 1, 4, 5, ..., 28, 29 of each 32 of K and the
    next one the other 16; wgmma, which many rows use on Hopper, takes 16 consecutive ones. Regrouped tiles have the
    order of wgmma. Regrouping itself is free: a thread holds the same elements, in other registers.
    """
    groups = tl.reshape(tile, (tile.numel // 32, 2, 4, 2, 2))
    return tl.reshape(tl.permute(groups, (0, 3, 2, 1, 4)), tile.shape)


@jit
def _batched_dot(x_tile, w, acc, SWAP_AB: tl.constexpr, REGROUP: tl.constexpr = False):
    """Multiply the K splits of inputs [4, BLOCK_M, BLOCK_K] by those of weights [4, BLOCK_N, BLOCK_K]."""
    if REGROUP:
        x_tile, w = regroup(x_tile), regroup(w)
    if SWAP_AB:
        acc = tl.dot(w, tl.permute(x_tile, (0, 2, 1)), acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        acc = tl.dot(x_tile, tl.permute(w, (0, 2, 1)), acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@jit
def _reduce_splits(partials, DIM_A: tl.constexpr, DIM_B: tl.constexpr, SWAP_AB: tl.constexpr):
    """Add the partial sums [4, DIM_A, DIM_B] of the K splits in order; returns [BLOCK_M, BLOCK_N]."""
    pairs = tl.permute(tl.reshape(partials, (2, 2, DIM_A, DIM_B)), (2, 3, 0, 1))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    acc = ((first + second) + third) + fourth
    if SWAP_AB:
        acc = tl.trans(acc)
    return acc


@kernel("rows")
def _small_m_kernel(
    x,
    weight,
    residual,
    scales,
    row_scales,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SINGLE_ROW: tl.constexpr,
    REGROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if SINGLE_ROW:
        rows = 1  # a compile-time constant saves registers and raises occupancy
    K_SPLIT: tl.constexpr = K // 4
    # A short K is dequantized before the wait; a long one keeps loads in flight throughout.
    LONG_K: tl.constexpr = K_SPLIT > 8 * BLOCK_K
    VOLATILE: tl.constexpr = LONG_K and (REGROUP or weight.dtype.element_ty == x.dtype.element_ty)
    # A volatile conversion hides the size of the weights from the compiler, which then groups K as for 16 bits.
    GROUPED: tl.constexpr = REGROUP and not (VOLATILE and x.dtype.element_ty == tl.bfloat16)
    SWAP_AB: tl.constexpr = BLOCK_M == 8  # SWAP_AB_ROWS
    DIM_A: tl.constexpr = BLOCK_N if SWAP_AB else BLOCK_M
    DIM_B: tl.constexpr = BLOCK_M if SWAP_AB else BLOCK_N
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split_start, k = tl.arange(0, 4) * K_SPLIT, tl.arange(0, BLOCK_K)
    dtype = x.dtype.element_ty
    offset_k = split_start[:, None, None] + k[None, None, :]
    w_ptrs = weight + tl.minimum(n, N - 1)[None, :, None] * K + offset_k
    if PDL:
        launch_dependents()
    # Weights do not depend on earlier kernels: they are loaded while the previous kernel still runs.
    w = tl.load(w_ptrs)
    if GATED:
        w_up = tl.load(w_ptrs + N * K)
    if K_SPLIT > BLOCK_K:
        w_next = tl.load(w_ptrs + BLOCK_K)
        if GATED:
            w_up_next = tl.load(w_ptrs + N * K + BLOCK_K)
    scale, up_scale = _load_scales(scales, n, N, HAS_SCALES, GATED)
    w = dequantize(w, dtype, VOLATILE, PINNED=not LONG_K)
    if GATED:
        w_up = dequantize(w_up, dtype, VOLATILE, PINNED=not LONG_K)
    if not LONG_K and K_SPLIT > BLOCK_K:
        w_next = dequantize(w_next, dtype, PINNED=True)
        if GATED:
            w_up_next = dequantize(w_up_next, dtype, PINNED=True)
    if PDL:
        grid_dependency_wait()
    x_ptrs = x + m[None, :, None] * K + offset_k
    row_mask = (m < rows)[None, :, None]
    acc = tl.zeros((4, DIM_A, DIM_B), tl.int32 if dtype == tl.int8 else tl.float32)
    acc_up = acc
    x_next = tl.load(x_ptrs, mask=row_mask, other=0.0)
    for start in tl.static_range(0, K_SPLIT, BLOCK_K):
        x_tile = x_next
        if start + BLOCK_K < K_SPLIT:
            x_next = tl.load(x_ptrs + start + BLOCK_K, mask=row_mask, other=0.0)
            w_used, w = w, w_next
            if GATED:
                w_up_used, w_up = w_up, w_up_next
        else:
            w_used = w
            if GATED:
                w_up_used = w_up
        if start + 2 * BLOCK_K < K_SPLIT:
            w_next = tl.load(w_ptrs + start + 2 * BLOCK_K)
            if GATED:
                w_up_next = tl.load(w_ptrs + N * K + start + 2 * BLOCK_K)
        if not (GROUPED and K_SPLIT == BLOCK_K):  # with one load, its layout conversion delays no other load
            x_tile = dequantize(x_tile, dtype, VOLATILE=True)
        acc = _batched_dot(x_tile, w_used, acc, SWAP_AB, GROUPED)
        if GATED:
            acc_up = _batched_dot(x_tile, w_up_used, acc_up, SWAP_AB, GROUPED)
        if start + BLOCK_K < K_SPLIT:
            w = dequantize(w, dtype, VOLATILE)
            if GATED:
                w_up = dequantize(w_up, dtype, VOLATILE)
    acc, acc_up = _reduce_splits(acc, DIM_A, DIM_B, SWAP_AB), _reduce_splits(acc_up, DIM_A, DIM_B, SWAP_AB)
    _epilogue(acc, acc_up, scale, up_scale, row_scales, residual, out, m, n, rows, N, HAS_SCALES, GATED, HAS_RESIDUAL)


@kernel("rows")
def _large_m_kernel(
    x,
    weight,
    residual,
    scales,
    row_scales,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    K_SPLIT: tl.constexpr = K // SPLIT_K
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    scale, up_scale = _load_scales(scales, n, N, HAS_SCALES, GATED)
    if PDL:
        launch_dependents_and_wait()
    m_mask, n_mask = (m < rows)[:, None], (n < N)[:, None]
    dtype = x.dtype.element_ty
    acc_0 = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if dtype == tl.int8 else tl.float32)
    acc_1, acc_2, acc_3 = acc_0, acc_0, acc_0
    up_0, up_1, up_2, up_3 = acc_0, acc_0, acc_0, acc_0
    for start in range(0, K_SPLIT, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_mask = (k < K_SPLIT)[None, :] if K_SPLIT % BLOCK_K else (k >= 0)[None, :]
        x_ptrs, w_ptrs = x + m[:, None] * K + k[None, :], weight + n[:, None] * K + k[None, :]
        x_tile = tl.load(x_ptrs, mask=m_mask & k_mask, other=0.0)
        acc_0 = dequant_dot(x_tile, w_ptrs, n_mask & k_mask, acc_0, dtype)
        if GATED:
            up_0 = dequant_dot(x_tile, w_ptrs + N * K, n_mask & k_mask, up_0, dtype)
        if SPLIT_K == 4:
            x_tile = tl.load(x_ptrs + K_SPLIT, mask=m_mask & k_mask, other=0.0)
            acc_1 = dequant_dot(x_tile, w_ptrs + K_SPLIT, n_mask & k_mask, acc_1, dtype)
            if GATED:
                up_1 = dequant_dot(x_tile, w_ptrs + N * K + K_SPLIT, n_mask & k_mask, up_1, dtype)
            x_tile = tl.load(x_ptrs + 2 * K_SPLIT, mask=m_mask & k_mask, other=0.0)
            acc_2 = dequant_dot(x_tile, w_ptrs + 2 * K_SPLIT, n_mask & k_mask, acc_2, dtype)
            if GATED:
                up_2 = dequant_dot(x_tile, w_ptrs + N * K + 2 * K_SPLIT, n_mask & k_mask, up_2, dtype)
            x_tile = tl.load(x_ptrs + 3 * K_SPLIT, mask=m_mask & k_mask, other=0.0)
            acc_3 = dequant_dot(x_tile, w_ptrs + 3 * K_SPLIT, n_mask & k_mask, acc_3, dtype)
            if GATED:
                up_3 = dequant_dot(x_tile, w_ptrs + N * K + 3 * K_SPLIT, n_mask & k_mask, up_3, dtype)
    acc, acc_up = ((acc_0 + acc_1) + acc_2) + acc_3, ((up_0 + up_1) + up_2) + up_3
    _epilogue(acc, acc_up, scale, up_scale, row_scales, residual, out, m, n, rows, N, HAS_SCALES, GATED, HAS_RESIDUAL)


@kernel("rows", "k_steps")
def _sequential_kernel(
    x,
    weight,
    residual,
    scales,
    row_scales,
    out,
    rows,
    k_steps,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Rows and outputs are multiples of the tile, so no load needs a mask.
    # Programs that share weights run next to each other, so that weights larger than the L2 cache are read once.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    scale, up_scale = _load_scales(scales, n, N, HAS_SCALES, GATED)
    # With a gate, rows of the gate and of the up projection alternate: one dot computes both.
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    index = tl.arange(0, WIDTH)
    column = tl.program_id(1) * BLOCK_N + (index // 2 if GATED else index)
    if GATED:
        column += index % 2 * N
    x_ptrs = x + m[:, None] * K + k[None, :]
    w_ptrs = weight + column[:, None] * K + k[None, :]
    dtype = x.dtype.element_ty
    if PDL:
        launch_dependents_and_wait()
    SPLIT_STEPS: tl.constexpr = K // 4 // BLOCK_K
    acc = tl.zeros((BLOCK_M, WIDTH), tl.int32 if dtype == tl.int8 else tl.float32)
    total = acc
    for step in range(0, k_steps):  # K // BLOCK_K; a constant would be unrolled
        x_tile = tl.load(x_ptrs + step * BLOCK_K)
        w = dequantize(tl.load(w_ptrs + step * BLOCK_K), dtype)
        acc = tl.dot(x_tile, tl.trans(w), acc, input_precision="ieee", out_dtype=acc.dtype)
        if dtype != tl.int8 and (step + 1) % SPLIT_STEPS == 0:  # the end of a split; integers need none
            total += acc
            acc = tl.zeros_like(acc)
    if dtype == tl.int8:
        total = acc
    up = total
    if GATED:
        total, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N, 2)))
    _epilogue(total, up, scale, up_scale, row_scales, residual, out, m, n, rows, N, HAS_SCALES, GATED, HAS_RESIDUAL)


@jit
def dequant_dot(x_tile, w_ptrs, mask, acc, dtype: tl.constexpr):
    """Load and dequantize weights [n, k] and accumulate x_tile [m, k] times their transpose."""
    w = dequantize(tl.load(w_ptrs, mask=mask, other=0.0), dtype)
    return tl.dot(x_tile, tl.trans(w), acc, input_precision="ieee", out_dtype=acc.dtype)


def linear(
    x: Tensor | Int8Rows,
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
    """Compute `linear_reference` in one launch, or two with a norm. x is contiguous; `out` may alias `residual`.

    int8 rows need an int8 weight; the result has the dtype of the rows before quantization.
    """
    row_scales, dtype = None, x.dtype
    if isinstance(x, Int8Rows):
        x, row_scales, dtype = x
    elif norm is not None:
        x = fused_rms_norm(x, norm, eps)
    rows, k = x.shape
    n = len(weight) // 2 if gated else len(weight)
    if out is None:
        out = x.new_empty(rows, n, dtype=dtype)
    split_k = 4 if k % 128 == 0 else 1
    shared_limit = shared_memory_limit(x.device)
    if tile is None and row_scales is not None:
        tile = int8_tile(rows, n, k, gated=gated, shared_limit=shared_limit)
    elif tile is None:
        quantized = weight.element_size() == 1
        tile = choose_tile(
            rows, n, k // split_k, gated=gated, quantized=quantized, dtype=x.dtype, shared_limit=shared_limit
        )
        tile = tile._replace(block_n=card_width(tile.block_n, n, -(-rows // tile.block_m), x.device))
    if row_scales is not None and tile.block_m > SMALL_M:
        split_k = 1  # integers need no fixed order, and one accumulator leaves room for larger tiles
    if tile.sequential and (rows % tile.block_m or n % tile.block_n or k // split_k % tile.block_k):
        raise ValueError(f"{tile} does not divide {rows} rows, {n} outputs and {split_k} splits of {k}")
    small_m = tile.block_m <= SMALL_M and split_k == 4 and k // split_k % tile.block_k == 0
    pdl = supports_pdl(x.device)
    grid = (-(-n // tile.block_n), -(-rows // tile.block_m))
    arguments = (
        x,
        weight,
        x if residual is None else residual,
        x if scales is None else scales,
        x if row_scales is None else row_scales,
        out,
        rows,
    )
    form = {"HAS_SCALES": scales is not None, "GATED": gated, "HAS_RESIDUAL": residual is not None, "PDL": pdl}
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    options = {"num_warps": tile.warps, "launch_pdl": pdl}
    if small_m:
        form |= {"SINGLE_ROW": rows == 1, "REGROUP": needs_regroup(x, weight, tile.block_k)}
        _small_m_kernel[grid](*arguments, N=n, K=k, **form, **blocks, **options)
        return out
    options["num_stages"] = tile.stages
    if tile.sequential:
        steps = k // tile.block_k
        _sequential_kernel[grid[::-1]](*arguments, steps, N=n, K=k, **form, **blocks, **options)
    else:
        _large_m_kernel[grid](*arguments, N=n, K=k, SPLIT_K=split_k, **form, **blocks, **options)
    return out


def needs_regroup(x: Tensor, weight: Tensor, block_k: int) -> bool:
    """Return whether a product of few rows must be regrouped to add in the order of many rows.

    Without wgmma, products of any number of rows use the same instruction and group K the same way.
    """
    return weight.element_size() == 1 and x.element_size() == 2 and block_k % 32 == 0 and has_wgmma(x.device)
