"""A residual unit of the codec's decoder in one launch: a dilated convolution, Snake, a mix of the channels, the sum.

What the first product makes never leaves the program that made it, so a program needs all channels. Blocks are powers
of two and the released sizes are not, but 96 and 192 are sums of two: an input is read once and multiplied with both.
Sums run in the order of two launches of `conv`, so whichever is faster may be taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.conv import Taps, conv_reference, snake
from shoal.kernels.jit import jit, kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl
from shoal.kernels.linear import Tile
from shoal.kernels.packing import Packing

# More channels than these, or fewer rows per channel, are faster in two launches, which spread channels over programs.
MAX_CHANNELS = 192
MIN_ROWS_PER_CHANNEL = 64


def residual_unit_reference(
    x: Tensor,
    turned: Tensor,
    inner: Taps,
    inner_alpha: Tensor,
    outer: Taps,
    outer_alpha: Tensor,
    past: Tensor,
    packing: Packing,
) -> tuple[Tensor, Tensor]:
    """x and snake(x) [P, channels] -> the same of the sum; `inner` has taps and a `past`, `outer` mixes channels."""
    _, middle = conv_reference(turned, inner, past, packing, alpha=inner_alpha)
    assert middle is not None
    total, following = conv_reference(middle, outer, None, packing, residual=x, alpha=outer_alpha)
    assert following is not None
    return total, following


@kernel("rate", "rows", "dilation")
def _unit_kernel(
    x,
    turned,
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
    following,
    rows,
    rate,
    dilation,
    TAPS: tl.constexpr,
    C: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    left, right = tl.arange(0, LEFT), LEFT + tl.arange(0, RIGHT)
    k = tl.arange(0, BLOCK_K)
    here = m < rows
    slot = tl.load(slots + m // rate, mask=here, other=0)
    time = m - tl.load(starts + m // rate, mask=here, other=0) * rate
    steps = (TAPS - 1) * dilation
    if AHEAD:
        launch_dependents_and_wait()
    a = tl.zeros((BLOCK_M, LEFT), tl.float32)
    b = tl.zeros((BLOCK_M, RIGHT), tl.float32)
    CHUNKS: tl.constexpr = C // BLOCK_K
    for step in range(0, TAPS * CHUNKS):
        tap, channel = step // CHUNKS, step % CHUNKS * BLOCK_K + k
        back = tap * dilation - steps
        at = time + back
        fresh = turned + (m + back)[:, None] * C + channel[None, :]
        stale = past + (slot * steps + steps + at)[:, None] * C + channel[None, :]
        part = tl.load(tl.where((at >= 0)[:, None], fresh, stale), mask=here[:, None], other=0.0)
        row = weight + tap * C * C + channel[None, :]
        a = tl.dot(part, tl.trans(tl.load(row + left[:, None] * C)), a, input_precision="ieee")
        b = tl.dot(part, tl.trans(tl.load(row + right[:, None] * C)), b, input_precision="ieee")
    a = _turned(a, bias, alpha, left, x.dtype.element_ty)
    b = _turned(b, bias, alpha, right, x.dtype.element_ty)
    _add(a, b, left, left, right, x, outer_weight, outer_bias, outer_alpha, out, following, m, here, C)
    _add(a, b, right, left, right, x, outer_weight, outer_bias, outer_alpha, out, following, m, here, C)


@jit
def _turned(total, bias, alpha, n, kind):
    """What the first product leaves for the second."""
    return snake(total + tl.load(bias + n)[None, :], tl.load(alpha + n)[None, :]).to(kind)


@jit
def _add(a, b, n, left, right, x, weight, bias, alpha, out, following, m, here, C: tl.constexpr):
    """The outputs n of the second product, added to x."""
    row = weight + n[:, None] * C
    y = tl.dot(a, tl.trans(tl.load(row + left[None, :])), input_precision="ieee")
    y = tl.dot(b, tl.trans(tl.load(row + right[None, :])), y, input_precision="ieee")
    place, kept = m[:, None] * C + n[None, :], here[:, None]
    y += tl.load(bias + n)[None, :]
    y += tl.load(x + place, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=kept)
    y = snake(y, tl.load(alpha + n)[None, :])
    tl.store(following + place, y.to(following.dtype.element_ty), mask=kept)


def residual_unit(
    x: Tensor,
    turned: Tensor,
    inner: Taps,
    inner_alpha: Tensor,
    outer: Taps,
    outer_alpha: Tensor,
    past: Tensor,
    packing: Packing,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """`residual_unit_reference` in one launch, for channels that `should_fuse` accepts."""
    rows, channels = x.shape
    out, following, ahead = torch.empty_like(x), torch.empty_like(x), supports_pdl(x.device)
    left = next_power_of_two(channels) // 2
    block_m, _, block_k, warps, stages = tile or choose_tile(rows, channels)
    _unit_kernel[(-(-rows // block_m),)](
        x,
        turned,
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
        following,
        rows,
        packing.rate(x),
        inner.dilation,
        TAPS=len(inner.weight),
        C=channels,
        LEFT=left,
        RIGHT=channels - left,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        AHEAD=ahead,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=ahead,
    )
    return out, following


def should_fuse(rows: int, channels: int) -> bool:
    """Whether one launch is possible, and faster than two."""
    right = channels - next_power_of_two(channels) // 2
    possible = right >= 16 and right == next_power_of_two(right)
    return possible and channels <= MAX_CHANNELS and rows >= MIN_ROWS_PER_CHANNEL * channels


def choose_tile(rows: int, channels: int) -> Tile:
    """What was fastest on an H200 at the sizes of the released codec."""
    block_k = next(size for size in (64, 32, 16) if channels % size == 0)
    if channels > 128:
        return Tile(64, channels, block_k)
    return Tile(128, channels, block_k) if rows >= 1 << 15 else Tile(64, channels, block_k, stages=4)
