"""Causal convolutions over channels-last streams, with what comes before, behind and after them in the same launch.

Activations are [F x rate, channels], the frames of several streams (`Packing`); the last inputs of a stream lie in
past [slots, steps, channels]. A transposed convolution of kernel 2 x stride is one of two taps with stride times as
many outputs; one of kernel = stride has a single tap. So one kernel serves the whole decoder of the codec. An output
depends on its own inputs alone, in one fixed order of summation: pieces of any sizes give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import jit, kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl
from shoal.kernels.linear import Tile
from shoal.kernels.packing import Packing

Activation = Literal["none", "gelu", "tanh"]


@dataclass(frozen=True, slots=True)
class Taps:
    """The weights of one convolution, packed: weight [taps, out, in], bias [out] in fp32."""

    weight: Tensor
    bias: Tensor
    dilation: int = 1

    @property
    def steps(self) -> int:
        """How many inputs of the past an output sees."""
        return (len(self.weight) - 1) * self.dilation


def snake_reference(x: Tensor, alpha: Tensor) -> Tensor:
    """x + sin²(αx)/α, one frequency per channel: x [..., channels], alpha [channels]"""
    return x + torch.sin(alpha * x).square() / (alpha + 1e-9)


def conv_reference(
    x: Tensor,
    taps: Taps,
    past: Tensor | None,
    packing: Packing,
    *,
    residual: Tensor | None = None,
    activation: Activation = "none",
    alpha: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x [P, in] -> y [P, out], and snake(y) if there is an `alpha` (of so many channels as repeat in `out`)."""
    weight = taps.weight.permute(1, 2, 0).float()
    pieces = [
        F.conv1d(joined.float().T[None], weight, taps.bias, dilation=taps.dilation)[0].T
        for joined in _joined(x, past, packing)
    ]
    y = torch.cat(pieces)
    y = F.gelu(y) if activation == "gelu" else torch.tanh(y) if activation == "tanh" else y
    if residual is not None:
        y = y + residual.float()
    turned = None
    if alpha is not None:
        turned = snake_reference(y, alpha.repeat(y.shape[-1] // len(alpha))).to(x.dtype)
    return y.to(x.dtype), turned


def remember_reference(x: Tensor, past: Tensor, packing: Packing) -> None:
    """Keep the last inputs of each stream."""
    for (slot, _, count), joined in zip(packing.streams(), _joined(x, past, packing), strict=True):
        if count:
            past[slot] = joined[len(joined) - past.shape[1] :]


def _joined(x: Tensor, past: Tensor | None, packing: Packing) -> list[Tensor]:
    """The inputs of every stream, each behind its past."""
    rate = packing.rate(x)
    pieces = [(slot, x[first * rate : (first + max(1, count)) * rate]) for slot, first, count in packing.streams()]
    return [piece if past is None else torch.cat((past[slot], piece)) for slot, piece in pieces]


@jit
def snake(y, alpha):
    # sin² repeats after π, so a polynomial over half a turn does, without the general sine's branches for huge angles.
    angle = alpha * y
    angle = angle - tl.floor(angle * 0.3183098861837907 + 0.5) * 3.141592653589793
    square = angle * angle
    turn = 1.0 / 120.0 + square * (-1.0 / 5040.0 + square * (1.0 / 362880.0 - square / 39916800.0))
    turn = angle * (1.0 + square * (-1.0 / 6.0 + square * turn))
    return y + turn * turn / (alpha + 1e-9)


@kernel("rate", "rows", "dilation")
def _conv_kernel(
    x,
    weight,
    bias,
    past,
    slots,
    starts,
    residual,
    alpha,
    out,
    turned,
    rows,
    rate,
    dilation,
    TAPS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GELU: tl.constexpr,
    TANH: tl.constexpr,
    ADDED: tl.constexpr,
    PLAIN: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    wanted = (n < OUT)[:, None]
    here = m < rows
    slot = tl.load(slots + m // rate, mask=here, other=0)
    time = m - tl.load(starts + m // rate, mask=here, other=0) * rate
    if AHEAD:
        launch_dependents_and_wait()
    steps = (TAPS - 1) * dilation
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    CHUNKS: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    for step in range(0, TAPS * CHUNKS):
        tap, channel = step // CHUNKS, step % CHUNKS * BLOCK_K + k
        inside = (channel < IN)[None, :] if IN % BLOCK_K else (k >= 0)[None, :]
        back = tap * dilation - steps
        at = time + back
        fresh = x + (m + back)[:, None] * IN + channel[None, :]
        if TAPS > 1:
            stale = past + (slot * steps + steps + at)[:, None] * IN + channel[None, :]
            part = tl.load(tl.where((at >= 0)[:, None], fresh, stale), mask=here[:, None] & inside, other=0.0)
        else:
            part = tl.load(fresh, mask=here[:, None] & inside, other=0.0)
        w = tl.load(weight + (tap * OUT + n)[:, None] * IN + channel[None, :], mask=wanted & inside, other=0.0)
        total = tl.dot(part, tl.trans(w), total, input_precision="ieee")
    y = total + tl.load(bias + n, mask=n < OUT, other=0.0)[None, :]
    if GELU:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if TANH:
        y = 1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0)
    place = m[:, None] * OUT + n[None, :]
    kept = here[:, None] & (n < OUT)[None, :]
    if ADDED:
        y += tl.load(residual + place, mask=kept, other=0.0).to(tl.float32)
    if PLAIN:
        tl.store(out + place, y.to(out.dtype.element_ty), mask=kept)
    if TURNED:
        frequency = tl.load(alpha + n % CHANNELS, mask=n < OUT, other=1.0)[None, :]
        tl.store(turned + place, snake(y, frequency).to(turned.dtype.element_ty), mask=kept)


@kernel("rate")
def _remember_kernel(
    x,
    past,
    slots,
    starts,
    counts,
    rate,
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    frame = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if AHEAD:
        launch_dependents_and_wait()
    start, count = tl.load(starts + frame), tl.load(counts + frame)
    if frame - start + 1 == count:  # the last of its stream
        step = tl.arange(0, PADDED)
        slot = tl.load(slots + frame)
        at = count * rate + step - STEPS  # of the new inputs; before them, of the past
        kept = (step < STEPS)[:, None] & (c < IN)[None, :]
        fresh = x + (start * rate + at)[:, None] * IN + c[None, :]
        stale = past + (slot * STEPS + STEPS + at)[:, None] * IN + c[None, :]
        value = tl.load(tl.where((at >= 0)[:, None], fresh, stale), mask=kept, other=0.0)
        # The past moves over itself: everything is read before anything is written.
        tl.debug_barrier()
        tl.store(past + (slot * STEPS + step)[:, None] * IN + c[None, :], value, mask=kept)


def conv(
    x: Tensor,
    taps: Taps,
    past: Tensor | None,
    packing: Packing,
    *,
    residual: Tensor | None = None,
    activation: Activation = "none",
    alpha: Tensor | None = None,
    plain: bool = True,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """`conv_reference` in one launch. Without `plain` only the turned output is written; what is not is x itself."""
    rows, channels = x.shape
    kernel, width = taps.weight.shape[:2]
    out = x.new_empty(rows, width) if plain else x
    turned = x if alpha is None else x.new_empty(rows, width)
    block_m, block_n, block_k, warps, stages = tile or choose_tile(rows, width, channels)
    ahead = supports_pdl(x.device)
    _conv_kernel[(-(-rows // block_m), -(-width // block_n))](
        x,
        taps.weight,
        taps.bias,
        x if past is None else past,
        packing.slots,
        packing.starts,
        x if residual is None else residual,
        taps.bias if alpha is None else alpha,
        out,
        turned,
        rows,
        packing.rate(x),
        taps.dilation,
        TAPS=kernel,
        IN=channels,
        OUT=width,
        CHANNELS=1 if alpha is None else len(alpha),
        GELU=activation == "gelu",
        TANH=activation == "tanh",
        ADDED=residual is not None,
        PLAIN=plain,
        TURNED=alpha is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        AHEAD=ahead,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=ahead,
    )
    return out, turned


def remember(x: Tensor, past: Tensor, packing: Packing) -> None:
    """`remember_reference` in one launch."""
    channels, steps, ahead, block = x.shape[1], past.shape[1], supports_pdl(x.device), 64
    _remember_kernel[(len(packing.slots), -(-channels // block))](
        x,
        past,
        packing.slots,
        packing.starts,
        packing.counts,
        packing.rate(x),
        STEPS=steps,
        PADDED=next_power_of_two(steps),
        IN=channels,
        BLOCK=block,
        AHEAD=ahead,
        num_warps=4,
        launch_pdl=ahead,
    )


def depthwise_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float, past: Tensor, packing: Packing
) -> Tensor:
    """One filter per channel, weight [taps, channels], then a layer norm over the channels: x, y [P, channels]"""
    filters = weight.float().T[:, None]
    pieces = [
        F.conv1d(joined.float().T[None], filters, bias, groups=len(filters))[0].T
        for joined in _joined(x, past, packing)
    ]
    y = torch.cat(pieces)
    return F.layer_norm(y, (y.shape[-1],), scale, shift, eps).to(x.dtype)


@kernel("rate")
def _depthwise_norm_kernel(
    x,
    weight,
    bias,
    scale,
    shift,
    past,
    slots,
    starts,
    out,
    rate,
    eps,
    TAPS: tl.constexpr,
    C: tl.constexpr,
    PADDED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    row = tl.program_id(0)
    c = tl.arange(0, PADDED)
    inside = c < C
    if AHEAD:
        launch_dependents_and_wait()
    slot, time = tl.load(slots + row // rate), row - tl.load(starts + row // rate) * rate
    y = tl.load(bias + c, mask=inside, other=0.0)
    for tap in range(0, TAPS):
        back = tap - (TAPS - 1)
        at = time + back
        fresh, stale = x + (row + back) * C, past + (slot * (TAPS - 1) + TAPS - 1 + at) * C
        part = tl.load(tl.where(at >= 0, fresh, stale) + c, mask=inside, other=0.0).to(tl.float32)
        y += part * tl.load(weight + tap * C + c, mask=inside, other=0.0).to(tl.float32)
    off = tl.where(inside, y - tl.sum(y, axis=0) / C, 0.0)
    y = off * tl.rsqrt(tl.sum(off * off, axis=0) / C + eps)
    y = y * tl.load(scale + c, mask=inside, other=0.0) + tl.load(shift + c, mask=inside, other=0.0)
    tl.store(out + row * C + c, y.to(out.dtype.element_ty), mask=inside)


def depthwise_norm(
    x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float, past: Tensor, packing: Packing
) -> Tensor:
    """`depthwise_norm_reference` in one launch; bias, scale and shift are in fp32."""
    rows, channels = x.shape
    out, ahead = torch.empty_like(x), supports_pdl(x.device)
    _depthwise_norm_kernel[(rows,)](
        x,
        weight,
        bias,
        scale,
        shift,
        past,
        packing.slots,
        packing.starts,
        out,
        packing.rate(x),
        eps,
        TAPS=len(weight),
        C=channels,
        PADDED=next_power_of_two(channels),
        AHEAD=ahead,
        num_warps=4,
        launch_pdl=ahead,
    )
    return out


def choose_tile(rows: int, width: int, channels: int) -> Tile:
    """How the work of one convolution is cut up: what was fastest on an H200 at the sizes of the released codec."""
    block_k = next((size for size in (64, 32) if channels % size == 0), 16)
    block_n = min(128, max(16, next_power_of_two(width)))
    if rows <= 16:
        return Tile(16, min(block_n, 32), block_k, stages=5)
    if block_n == 16:
        return Tile(128 if rows > 4096 else 16, block_n, block_k)
    if rows * width < 1 << 19:
        return Tile(64, min(block_n, 32), block_k, stages=6)
    if rows * width < 1 << 21 or width % 128:
        return Tile(128, block_n, block_k) if channels <= 96 else Tile(64, min(block_n, 64), block_k, stages=4)
    return Tile(64, block_n, block_k)
