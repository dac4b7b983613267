"""Residual unit of the codec decoder in one launch: dilated convolution, Snake, pointwise convolution, residual add.

The activations between the two products stay in the program, so a program needs all channels. Triton block sizes are
powers of two and the released channel counts are not, but 96 and 192 are sums of two powers: each input block is loaded
once and multiplied with both column blocks. Sums run in the same order as in two launches of `conv`, so both paths are
bit-identical and the faster one may be chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.codec_decoder.conv import Taps, conv_reference, snake
from shoal.kernels.codec_decoder.packing import Packing
from shoal.kernels.jit import jit, kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl
from shoal.kernels.tile import Tile

# With more channels, or fewer rows per channel, two launches are faster because they distribute channels over programs.
MAX_CHANNELS = 192
MIN_ROWS_PER_CHANNEL = 64


def residual_unit_reference(
    x: Tensor,
    activated: Tensor,
    inner: Taps,
    inner_alpha: Tensor,
    outer: Taps,
    outer_alpha: Tensor,
    past: Tensor,
    packing: Packing,
) -> tuple[Tensor, Tensor]:
    """Map x and activated = snake(x) [P, channels] to the unit's output y and snake(y).

    `inner` is the dilated convolution with left context `past`; `outer` is pointwise.
    """
    _, hidden = conv_reference(activated, inner, past, packing, alpha=inner_alpha)
    assert hidden is not None
    y, y_activated = conv_reference(hidden, outer, None, packing, residual=x, alpha=outer_alpha)
    assert y_activated is not None
    return y, y_activated


@kernel("rate", "rows", "dilation", "k_steps")
def _residual_unit_kernel(
    x,
    activated,
    weight,
    bias,
    alpha,
    past,
    slots,
    starts,
    outer_weight,
    outer_bias,
    outer_alpha,
    out,
    out_activated,
    rows,
    rate,
    dilation,
    k_steps,
    TAPS: tl.constexpr,
    C: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    left, right = tl.arange(0, LEFT), LEFT + tl.arange(0, RIGHT)
    k = tl.arange(0, BLOCK_K)
    m_mask = m < rows
    slot = tl.load(slots + m // rate, mask=m_mask, other=0)
    time = m - tl.load(starts + m // rate, mask=m_mask, other=0) * rate
    steps = (TAPS - 1) * dilation
    new_ptrs = activated + m[:, None] * C + k[None, :]
    past_ptrs = past + (slot * steps + steps + time)[:, None] * C + k[None, :]
    left_ptrs, right_ptrs = weight + left[:, None] * C + k[None, :], weight + right[:, None] * C + k[None, :]
    if PDL:
        launch_dependents_and_wait()
    acc_left = tl.zeros((BLOCK_M, LEFT), tl.float32)
    acc_right = tl.zeros((BLOCK_M, RIGHT), tl.float32)
    K_BLOCKS: tl.constexpr = C // BLOCK_K
    for step in range(0, k_steps):  # TAPS * K_BLOCKS; a constant would be unrolled
        tap, channel = step // K_BLOCKS, step % K_BLOCKS * BLOCK_K
        back = steps - tap * dilation
        x_ptrs = tl.where((time >= back)[:, None], new_ptrs, past_ptrs)
        x_ptrs += channel - back * C
        x_tile = tl.load(x_ptrs) if EVEN_M else tl.load(x_ptrs, mask=m_mask[:, None], other=0.0)
        offset = tap * C * C + channel
        acc_left = tl.dot(x_tile, tl.trans(tl.load(left_ptrs + offset)), acc_left, input_precision="ieee")
        acc_right = tl.dot(x_tile, tl.trans(tl.load(right_ptrs + offset)), acc_right, input_precision="ieee")
    hidden_left = _activate(acc_left, bias, alpha, left, x.dtype.element_ty)
    hidden_right = _activate(acc_right, bias, alpha, right, x.dtype.element_ty)
    _outer_product(
        hidden_left,
        hidden_right,
        left,
        left,
        right,
        x,
        outer_weight,
        outer_bias,
        outer_alpha,
        out,
        out_activated,
        m,
        m_mask,
        C,
    )
    _outer_product(
        hidden_left,
        hidden_right,
        right,
        left,
        right,
        x,
        outer_weight,
        outer_bias,
        outer_alpha,
        out,
        out_activated,
        m,
        m_mask,
        C,
    )


@jit
def _activate(acc, bias, alpha, n, dtype):
    """Add the bias and apply Snake to channels n of the inner convolution."""
    return snake(acc + tl.load(bias + n)[None, :], tl.load(alpha + n)[None, :]).to(dtype)


@jit
def _outer_product(
    hidden_left, hidden_right, n, left, right, x, weight, bias, alpha, out, out_activated, m, m_mask, C: tl.constexpr
):
    """Compute and store output channels n: the pointwise convolution plus the residual x."""
    w_ptrs = weight + n[:, None] * C
    y = tl.dot(hidden_left, tl.trans(tl.load(w_ptrs + left[None, :])), input_precision="ieee")
    y = tl.dot(hidden_right, tl.trans(tl.load(w_ptrs + right[None, :])), y, input_precision="ieee")
    offset, mask = m[:, None] * C + n[None, :], m_mask[:, None]
    y += tl.load(bias + n)[None, :]
    y += tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)
    y = snake(y, tl.load(alpha + n)[None, :])
    tl.store(out_activated + offset, y.to(out_activated.dtype.element_ty), mask=mask)


def residual_unit(
    x: Tensor,
    activated: Tensor,
    inner: Taps,
    inner_alpha: Tensor,
    outer: Taps,
    outer_alpha: Tensor,
    past: Tensor,
    packing: Packing,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `residual_unit_reference` in one launch, for shapes that `should_fuse` accepts."""
    rows, channels = x.shape
    out, out_activated, pdl = torch.empty_like(x), torch.empty_like(x), supports_pdl(x.device)
    left = next_power_of_two(channels) // 2
    block_m, _, block_k, warps, stages, _ = tile or choose_tile(rows, channels)
    _residual_unit_kernel[(-(-rows // block_m),)](
        x,
        activated,
        inner.weight,
        inner.bias,
        inner_alpha,
        past,
        packing.slots,
        packing.starts,
        outer.weight,
        outer.bias,
        outer_alpha,
        out,
        out_activated,
        rows,
        packing.rate(x),
        inner.dilation,
        len(inner.weight) * (channels // block_k),
        TAPS=len(inner.weight),
        C=channels,
        LEFT=left,
        RIGHT=channels - left,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        EVEN_M=rows % block_m == 0,
        PDL=pdl,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=pdl,
    )
    return out, out_activated


def should_fuse(rows: int, channels: int) -> bool:
    """Return whether one launch is possible and faster than two."""
    right = channels - next_power_of_two(channels) // 2
    possible = right >= 16 and right == next_power_of_two(right)
    return possible and channels <= MAX_CHANNELS and rows >= MIN_ROWS_PER_CHANNEL * channels


def choose_tile(rows: int, channels: int) -> Tile:
    """Return the tile that was fastest on an H200 at the sizes of the released codec."""
    block_k = next(size for size in (64, 32, 16) if channels % size == 0)
    if channels > 128:
        return Tile(64, channels, block_k)
    return Tile(128, channels, block_k) if 1 << 15 <= rows < 1 << 18 else Tile(64, channels, block_k, stages=4)
