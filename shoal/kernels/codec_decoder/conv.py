"""Causal streaming convolutions over packed channels-last batches, with fused bias, activation, residual and Snake.

Activations are [P, channels], P = F x rate rows for the F frames of several streams (`Packing`). The left context of a
stream, its last inputs, is past [slots, steps, channels]. A transposed convolution with kernel = 2 x stride equals a
convolution of two taps with stride times as many outputs; with kernel = stride it has a single tap. One kernel
therefore serves the whole codec decoder. Every output is summed in one fixed order, so any chunking of a stream gives
the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.codec_decoder.packing import Packing
from shoal.kernels.jit import (
    HOPPER_SHARED_MEMORY,
    jit,
    kernel,
    launch_dependents_and_wait,
    next_power_of_two,
    shared_memory_limit,
    supports_pdl,
    tl,
)
from shoal.kernels.tile import Tile

Activation = Literal["none", "gelu"]


@dataclass(frozen=True, slots=True)
class Taps:
    """Packed weights of one convolution: weight [taps, out, in], bias [out] in fp32."""

    weight: Tensor
    bias: Tensor
    dilation: int = 1

    @property
    def steps(self) -> int:
        """Return the number of past inputs an output depends on (left context)."""
        return (len(self.weight) - 1) * self.dilation


def snake_reference(x: Tensor, alpha: Tensor) -> Tensor:
    """Return x + sin²(αx)/α with one frequency per channel: x [..., channels], alpha [channels]."""
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
    """Convolve x [P, in] -> y [P, out]; also return snake(y) if `alpha` is given.

    `alpha` has the channels of one phase: `out` of an upsampling convolution repeats them once per phase.
    """
    weight = taps.weight.permute(1, 2, 0).float()
    outputs = [
        F.conv1d(joined.float().T[None], weight, taps.bias, dilation=taps.dilation)[0].T
        for joined in _with_past(x, past, packing)
    ]
    y = torch.cat(outputs)
    y = F.gelu(y) if activation == "gelu" else y
    if residual is not None:
        y = y + residual.float()
    activated = None
    if alpha is not None:
        activated = snake_reference(y, alpha.repeat(y.shape[-1] // len(alpha))).to(x.dtype)
    return y.to(x.dtype), activated


def update_past_reference(x: Tensor, past: Tensor, packing: Packing) -> None:
    """Store the last inputs of each stream as its left context for the next call."""
    for (slot, _, count), joined in zip(packing.streams(), _with_past(x, past, packing), strict=True):
        if count:
            past[slot] = joined[len(joined) - past.shape[1] :]


def _with_past(x: Tensor, past: Tensor | None, packing: Packing) -> list[Tensor]:
    """Return the inputs of every stream, each preceded by its left context."""
    rate = packing.rate(x)
    inputs = [(slot, x[first * rate : (first + max(1, count)) * rate]) for slot, first, count in packing.streams()]
    return [new if past is None else torch.cat((past[slot], new)) for slot, new in inputs]


@jit
def snake(y, alpha):
    """Compute `snake_reference` with a polynomial."""
    # sin²(πt) has period 1, so a polynomial in t² over [-1/2, 1/2] suffices (minimax, error 3e-7); the general sine has
    # branches for huge angles. The decoder computes this 78 million times per second of audio.
    frequency = alpha * 0.3183098861837907
    # Adding 1.5 * 2^23 rounds to an integer, faster than `floor`.
    minus_turns = 12582912.0 - tl.fma(y, frequency, 12582912.0)
    t = tl.fma(y, frequency, minus_turns)
    square = t * t
    series = 42.72547886 + square * (-30.08575227 + square * (12.98722362 - square * 3.26512228))
    sine_squared = square * (9.86960336 + square * (-32.46959462 + square * series))
    return y + sine_squared * (1.0 / (alpha + 1e-9))


@kernel("rate", "rows", "dilation", "k_steps")
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
    activated,
    rows,
    rate,
    dilation,
    k_steps,
    TAPS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GELU: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STORE_PLAIN: tl.constexpr,
    HAS_SNAKE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr,
    N_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    if N_FIRST:
        pid_n, pid_m = tl.program_id(0), tl.program_id(1)
    else:
        pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_mask = m < rows
    column = tl.minimum(n, OUT - 1) if OUT % BLOCK_N else n
    slot = tl.load(slots + m // rate, mask=m_mask, other=0)
    time = m - tl.load(starts + m // rate, mask=m_mask, other=0) * rate
    steps = (TAPS - 1) * dilation
    new_ptrs = x + m[:, None] * IN + k[None, :]
    past_ptrs = past + (slot * steps + steps + time)[:, None] * IN + k[None, :]
    w_ptrs = weight + column[:, None] * IN + k[None, :]
    if PDL:
        launch_dependents_and_wait()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    K_BLOCKS: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    for step in range(0, k_steps):  # TAPS * K_BLOCKS; a constant would be unrolled
        tap, channel = step // K_BLOCKS, step % K_BLOCKS * BLOCK_K
        back = steps - tap * dilation
        # New inputs and left context differ only in their base address, so one load reads either.
        x_ptrs = tl.where((time >= back)[:, None], new_ptrs, past_ptrs) if TAPS > 1 else new_ptrs
        x_ptrs += channel - back * IN
        tap_ptrs = w_ptrs + (tap * OUT * IN + channel)
        if EVEN_M and IN % BLOCK_K == 0:  # most layers; without masks the loop has half as many instructions
            x_tile, w = tl.load(x_ptrs), tl.load(tap_ptrs)
        else:
            k_mask = (channel + k < IN)[None, :]
            x_tile = tl.load(x_ptrs, mask=m_mask[:, None] & k_mask, other=0.0)
            w = tl.load(tap_ptrs, mask=k_mask, other=0.0)
        acc = tl.dot(x_tile, tl.trans(w), acc, input_precision="ieee")
    y = acc + tl.load(bias + n, mask=n < OUT, other=0.0)[None, :]
    if GELU:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    offset = m[:, None] * OUT + n[None, :]
    mask = m_mask[:, None] & (n < OUT)[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    if STORE_PLAIN:
        tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)
    if HAS_SNAKE:
        frequency = tl.load(alpha + n % CHANNELS, mask=n < OUT, other=1.0)[None, :]
        tl.store(activated + offset, snake(y, frequency).to(activated.dtype.element_ty), mask=mask)


@kernel("rate")
def _update_past_kernel(
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
    PDL: tl.constexpr,
):
    frame = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Slots, starts and counts are uploaded by the host and written by no kernel: no need to wait for them.
    slot, start, count = tl.load(slots + frame), tl.load(starts + frame), tl.load(counts + frame)
    if PDL:
        launch_dependents_and_wait()
    if frame - start + 1 == count:  # the last frame of its stream
        step = tl.arange(0, PADDED)
        at = count * rate + step - STEPS  # index into the new inputs; negative: into the past
        mask = (step < STEPS)[:, None] & (c < IN)[None, :]
        new_ptrs = x + (start * rate + at)[:, None] * IN + c[None, :]
        past_ptrs = past + (slot * STEPS + STEPS + at)[:, None] * IN + c[None, :]
        value = tl.load(tl.where((at >= 0)[:, None], new_ptrs, past_ptrs), mask=mask, other=0.0)
        # The past is shifted in place: all reads must come before the writes.
        tl.debug_barrier()
        tl.store(past + (slot * STEPS + step)[:, None] * IN + c[None, :], value, mask=mask)


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
    """Compute `conv_reference` in one launch: returns (y, snake(y)).

    x is returned in place of an output that is not computed: y without `plain`, snake(y) without `alpha`.
    """
    rows, channels = x.shape
    kernel, width = taps.weight.shape[:2]
    out = x.new_empty(rows, width) if plain else x
    activated = x if alpha is None else x.new_empty(rows, width)
    tile = tile or choose_tile(rows, width, channels, kernel, shared_memory_limit(x.device))
    block_m, block_n, block_k, warps, stages, _ = tile
    # In large layers, programs that share inputs run next to each other: inputs larger than the L2 cache are read once.
    n_first = (block_m, warps) == (128, 4)
    pdl = supports_pdl(x.device)
    grid = (-(-rows // block_m), -(-width // block_n))
    _conv_kernel[grid[::-1] if n_first else grid](
        x,
        taps.weight,
        taps.bias,
        x if past is None else past,
        packing.slots,
        packing.starts,
        x if residual is None else residual,
        taps.bias if alpha is None else alpha,
        out,
        activated,
        rows,
        packing.rate(x),
        taps.dilation,
        kernel * -(-channels // block_k),
        TAPS=kernel,
        IN=channels,
        OUT=width,
        CHANNELS=1 if alpha is None else len(alpha),
        GELU=activation == "gelu",
        HAS_RESIDUAL=residual is not None,
        STORE_PLAIN=plain,
        HAS_SNAKE=alpha is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_M=rows % block_m == 0,
        N_FIRST=n_first,
        PDL=pdl,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=pdl,
    )
    return out, activated


def update_past(x: Tensor, past: Tensor, packing: Packing) -> None:
    """Compute `update_past_reference` in one launch."""
    channels, steps, pdl, block = x.shape[1], past.shape[1], supports_pdl(x.device), 64
    _update_past_kernel[(len(packing.slots), -(-channels // block))](
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
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def depthwise_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float, past: Tensor, packing: Packing
) -> Tensor:
    """Apply a depthwise convolution with weight [taps, channels], then LayerNorm over channels: x, y [P, channels]."""
    filters = weight.float().T[:, None]
    outputs = [
        F.conv1d(joined.float().T[None], filters, bias, groups=len(filters))[0].T
        for joined in _with_past(x, past, packing)
    ]
    y = torch.cat(outputs)
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
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    c = tl.arange(0, PADDED)
    mask = c < C
    slot, time = tl.load(slots + row // rate), row - tl.load(starts + row // rate) * rate
    y = tl.load(bias + c, mask=mask, other=0.0)
    if PDL:
        launch_dependents_and_wait()
    for tap in range(0, TAPS):
        back = tap - (TAPS - 1)
        at = time + back
        new_ptrs, past_ptrs = x + (row + back) * C, past + (slot * (TAPS - 1) + TAPS - 1 + at) * C
        x_tap = tl.load(tl.where(at >= 0, new_ptrs, past_ptrs) + c, mask=mask, other=0.0).to(tl.float32)
        y += x_tap * tl.load(weight + tap * C + c, mask=mask, other=0.0).to(tl.float32)
    centered = tl.where(mask, y - tl.sum(y, axis=0) / C, 0.0)
    y = centered * tl.rsqrt(tl.sum(centered * centered, axis=0) / C + eps)
    y = y * tl.load(scale + c, mask=mask, other=0.0) + tl.load(shift + c, mask=mask, other=0.0)
    tl.store(out + row * C + c, y.to(out.dtype.element_ty), mask=mask)


def depthwise_norm(
    x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float, past: Tensor, packing: Packing
) -> Tensor:
    """Compute `depthwise_norm_reference` in one launch; bias, scale and shift are fp32."""
    rows, channels = x.shape
    out, pdl = torch.empty_like(x), supports_pdl(x.device)
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
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def choose_tile(rows: int, width: int, channels: int, taps: int, shared_limit: int) -> Tile:
    """Return the tile that was fastest on an H200 at the sizes of the released codec.

    Tiles for many rows were measured on Hopper only; cards with less shared memory keep smaller ones.
    """
    block_k = next((size for size in (64, 32) if channels % size == 0), 16)
    block_n = min(128, max(16, next_power_of_two(width)))
    if rows <= 16:
        return Tile(16, min(block_n, 32), block_k, stages=5)
    if block_n == 16:
        return Tile(128 if rows > 4096 else 16, block_n, block_k)
    if shared_limit >= HOPPER_SHARED_MEMORY and block_k == 64:
        tile = _many_rows_tile(rows, width, taps * channels)
        if tile is not None:
            return tile
    if rows * width < 1 << 19:
        return Tile(64, min(block_n, 32), block_k, stages=6)
    if rows * width < 1 << 21 or width % 128:
        return Tile(128, block_n, block_k) if channels <= 96 else Tile(64, min(block_n, 64), block_k, stages=4)
    return Tile(64, block_n, block_k)


def _many_rows_tile(rows: int, width: int, k: int) -> Tile | None:
    """Return a tile that reads less from the L2 cache, which limits large layers; None if it would idle the GPU."""
    if width % 128:
        return Tile(128, 64, 64, stages=4) if width % 64 == 0 and rows >= 1 << 14 else None
    programs = -(-rows // 128) * (width // 128)
    if programs >= 1024:
        return Tile(128, 128, 64)
    return Tile(128, 128, 64, warps=8, stages=4) if programs >= 96 and k >= 2048 else None
