"""Linear layer over int4 weights in groups of 128 input columns, dequantized in registers.

A weight is (q - 8) * scale + zero, with one scale and zero per output row and group. The scale is applied to the
product with a group and the zero to the sum of its inputs: y = sum over groups of scale * x.(q - 8) + zero * sum(x).
Tensor cores then multiply small integers, which are exact in 16 bits. Two columns share a byte, the even one low; the
low and the high halves of the bytes are two products, over the even and the odd inputs.

As in `linear`, K is split in four, each split is summed from its first to its last group, and the four sums are added
in order, at any number of rows: results are batch invariant.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import (
    ASSEMBLER,
    grid_dependency_wait,
    interpreted,
    jit,
    kernel,
    launch_dependents,
    shared_memory_limit,
    supports_pdl,
    tl,
    triton,
)
from shoal.kernels.linear.linear import _batched_dot, _epilogue, _reduce_splits
from shoal.kernels.tile import SWAP_AB_ROWS, Tile

GROUP = 128  # input columns per scale and zero
SHARED_32_ROWS = 81_920  # bytes of shared memory that tiles of 32 rows need at most

# Four bytes -> four even and four odd columns as bf16 pairs. 128 + n in bf16 is 0x4300 + n, so a nibble n below the
# byte 0x43 is 128 + n; minus 136 it is q - 8.
UNPACK = """
{ .reg .b32 low, high, magic, one, offset;
mov.b32 magic, 0x43434343;
mov.b32 one, 0x3f803f80;
mov.b32 offset, 0xc308c308;
and.b32 low, $4, 0x0f0f0f0f;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0f0f0f0f;
prmt.b32 $0, low, magic, 0x4140;
prmt.b32 $1, low, magic, 0x4342;
prmt.b32 $2, high, magic, 0x4140;
prmt.b32 $3, high, magic, 0x4342;
fma.rn.bf16x2 $0, $0, one, offset;
fma.rn.bf16x2 $1, $1, one, offset;
fma.rn.bf16x2 $2, $2, one, offset;
fma.rn.bf16x2 $3, $3, one, offset; }
"""

if triton is not None:
    UNPACK_ASM = tl.constexpr(UNPACK)
    UNPACK_CONSTRAINTS = tl.constexpr("=r,=r,=r,=r,r")
    USE_ASM = tl.constexpr(ASSEMBLER and not interpreted())


def supports_int4(in_features: int, group_size: int | None) -> bool:
    """Return whether the kernel can compute a layer: whole groups of 128 columns in each of the four splits."""
    return group_size == GROUP and in_features % (4 * GROUP) == 0


def int4_linear_reference(
    x: Tensor, weight: Tensor, affine: Tensor, *, residual: Tensor | None = None, gated: bool = False
) -> Tensor:
    """Multiply x [rows, in] by int4 weight [out, in / 2] with scales and zeros affine [groups, out, 2].

    With `gated`, weight holds the gate and the up projection, one below the other.
    """
    y = F.linear(x.float(), dequantize_int4(weight, affine)).to(x.dtype)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


def dequantize_int4(weight: Tensor, affine: Tensor) -> Tensor:
    """Return the weight [out, in] in fp32."""
    q = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2).float() - 8
    scale, zero = affine[:, : len(weight)].float().repeat_interleave(GROUP, dim=0).unbind(-1)
    return q * scale.T + zero.T


@jit
def _unpack(packed, dtype: tl.constexpr):
    """Return q - 8 of the even and of the odd columns."""
    if USE_ASM and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            UNPACK_ASM, UNPACK_CONSTRAINTS, [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low = ((packed & 15).to(tl.int8) - 8).to(dtype)
        high = ((packed >> 4).to(tl.int8) - 8).to(dtype)
    return low, high


@jit
def _load_affine(affine_ptrs, mask):
    """Return scales and zeros [4, BLOCK_N] of one group of each split."""
    scale = tl.load(affine_ptrs, mask=mask, other=0.0).to(tl.float32)
    return scale, tl.load(affine_ptrs + 1, mask=mask, other=0.0).to(tl.float32)


@jit
def _group_product(x_even, x_odd, x_sum, packed, scale, zero, acc, dtype: tl.constexpr, SWAP_AB: tl.constexpr):
    """Add the product with one group of weights of each split to acc [4, DIM_A, DIM_B]."""
    low, high = _unpack(packed, dtype)
    part = _batched_dot(x_odd, high, _batched_dot(x_even, low, tl.zeros_like(acc), SWAP_AB), SWAP_AB)
    # Written as FMA: the compiler must not round differently at another tile size.
    if SWAP_AB:
        acc = tl.fma(part, scale[:, :, None], tl.fma(x_sum[:, None, :], zero[:, :, None], acc))
    else:
        acc = tl.fma(part, scale[:, None, :], tl.fma(x_sum[:, :, None], zero[:, None, :], acc))
    return acc


@kernel("rows")
def _int4_kernel(
    x,
    weight,
    affine,
    residual,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    AFFINE_ROWS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    QUARTER: tl.constexpr = K // 512  # groups per quarter of K
    # Groups per split. With PARTIAL, the four splits are those of the quarter of K that this program computes.
    GROUPS: tl.constexpr = (QUARTER + 3) // 4 if PARTIAL else QUARTER
    END: tl.constexpr = QUARTER if PARTIAL else 4 * QUARTER
    SWAP_AB: tl.constexpr = BLOCK_M == 8  # SWAP_AB_ROWS
    DIM_A: tl.constexpr = BLOCK_N if SWAP_AB else BLOCK_M
    DIM_B: tl.constexpr = BLOCK_M if SWAP_AB else BLOCK_N
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) * QUARTER
    split = tl.arange(0, 4) * GROUPS  # first group of each split
    m_mask, n_mask = (m < rows)[None, :, None], (n < N)[None, :]
    dtype = x.dtype.element_ty
    ones = tl.full((4, 16 if SWAP_AB else 8, 64), 1.0, dtype)
    x_ptrs = x + m[None, :, None] * K + (begin + split)[:, None, None] * 128 + tl.arange(0, 128)[None, None, :]
    byte = (begin + split)[:, None, None] * 64 + tl.arange(0, 64)[None, None, :]
    w_ptrs = weight + n[None, :, None] * (K // 2) + byte
    affine_ptrs = affine + ((begin + split)[:, None] * AFFINE_ROWS + n[None, :]) * 2
    acc = tl.zeros((4, DIM_A, DIM_B), tl.float32)
    acc_up = tl.zeros((4, DIM_A, DIM_B), tl.float32)
    # Scales, zeros and inputs are loaded one group ahead; the compiler prefetches the weights alone. A quarter may not
    # be a multiple of four groups: beyond its end everything is zero.
    affine_mask = (split < END)[:, None] & n_mask
    scale_next, zero_next = _load_affine(affine_ptrs, affine_mask)
    if GATED:
        up_scale_next, up_zero_next = _load_affine(affine_ptrs + 2 * N, affine_mask)
    if PDL:
        launch_dependents()
        grid_dependency_wait()
    x_next = tl.load(x_ptrs, mask=m_mask & (split < END)[:, None, None], other=0.0)
    for group in range(0, GROUPS):
        x_tile, scale, zero = x_next, scale_next, zero_next
        following = tl.minimum(group + 1, GROUPS - 1)
        inside = split + following < END
        x_next = tl.load(x_ptrs + following * 128, mask=m_mask & inside[:, None, None], other=0.0)
        following_affine, affine_mask = affine_ptrs + following * (2 * AFFINE_ROWS), inside[:, None] & n_mask
        scale_next, zero_next = _load_affine(following_affine, affine_mask)
        if GATED:
            up_scale, up_zero = up_scale_next, up_zero_next
            up_scale_next, up_zero_next = _load_affine(following_affine + 2 * N, affine_mask)
        x_even, x_odd = tl.split(tl.reshape(x_tile, (4, BLOCK_M, 64, 2)))
        # The sum of the inputs is a product with ones, because the order of a reduction depends on the tile.
        sums = tl.zeros((4, 16, BLOCK_M) if SWAP_AB else (4, BLOCK_M, 8), tl.float32)
        sums = _batched_dot(x_odd, ones, _batched_dot(x_even, ones, sums, SWAP_AB), SWAP_AB)
        x_sum = tl.max(sums, axis=1 if SWAP_AB else 2)
        w_mask = n_mask[:, :, None] & (split + group < END)[:, None, None]
        packed = tl.load(w_ptrs + group * 64, mask=w_mask, other=0)
        acc = _group_product(x_even, x_odd, x_sum, packed, scale, zero, acc, dtype, SWAP_AB)
        if GATED:
            packed = tl.load(w_ptrs + N * (K // 2) + group * 64, mask=w_mask, other=0)
            acc_up = _group_product(x_even, x_odd, x_sum, packed, up_scale, up_zero, acc_up, dtype, SWAP_AB)
    acc, acc_up = _reduce_splits(acc, DIM_A, DIM_B, SWAP_AB), _reduce_splits(acc_up, DIM_A, DIM_B, SWAP_AB)
    if PARTIAL:
        offset = (tl.program_id(2) * rows + m)[:, None] * N + n[None, :]
        tl.store(out + offset, acc, mask=(m < rows)[:, None] & (n < N)[None, :])
    else:
        _epilogue(acc, acc_up, 1.0, 1.0, out, residual, out, m, n, rows, N, False, GATED, HAS_RESIDUAL)


def int4_linear(
    x: Tensor,
    weight: Tensor,
    affine: Tensor,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Compute `int4_linear_reference` in one launch. x is contiguous; `out` may alias `residual`.

    `affine` may have more rows than the weight: those of outputs that are not computed.
    """
    n = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(len(x), n) if out is None else out
    _launch(x, weight, affine, residual, out, n, tile, gated=gated)
    return out


def int4_split_k_linear(x: Tensor, weight: Tensor, affine: Tensor, *, tile: Tile | None = None) -> Tensor:
    """Return the partial sums [4, rows, out] in fp32 of a 4-way split of K, for `fused_rms_norm` to reduce.

    A layer with few outputs has too few programs to hide the latency of its loads; this has four times as many. Each
    program sums its part of K in four splits again, so the result is not bit-identical to `int4_linear`: a layer has to
    use the same function at any number of rows.
    """
    partials = torch.empty(4, len(x), len(weight), dtype=torch.float32, device=x.device)
    _launch(x, weight, affine, None, partials, len(weight), tile, partial=True)
    return partials


def _launch(
    x: Tensor,
    weight: Tensor,
    affine: Tensor,
    residual: Tensor | None,
    out: Tensor,
    n: int,
    tile: Tile | None,
    *,
    gated: bool = False,
    partial: bool = False,
) -> None:
    rows, pdl = len(x), supports_pdl(x.device)
    tile = tile or choose_tile(rows, n, gated=gated, shared_limit=shared_memory_limit(x.device))
    _int4_kernel[(-(-n // tile.block_n), -(-rows // tile.block_m), 4 if partial else 1)](
        x,
        weight,
        affine,
        x if residual is None else residual,
        out,
        rows,
        N=n,
        K=x.shape[1],
        AFFINE_ROWS=affine.shape[1],
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        PARTIAL=partial,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PDL=pdl,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=pdl,
    )


def choose_tile(rows: int, n: int, *, gated: bool, shared_limit: int) -> Tile:
    """Return the tile for `rows` rows and n outputs, within `shared_limit` bytes of shared memory.

    The tile changes the speed, not the result.
    """
    if rows <= 16:
        # The fastest over all products of S2-Pro, of the tiles tried with one row on an H200.
        return Tile(SWAP_AB_ROWS, 32, GROUP, stages=4) if rows <= SWAP_AB_ROWS else Tile(16, 16, GROUP, stages=4)
    block_n = 16 if gated or n <= 4096 else 32
    return Tile(32 if shared_limit >= SHARED_32_ROWS else 16, block_n, GROUP, warps=8, stages=3)
