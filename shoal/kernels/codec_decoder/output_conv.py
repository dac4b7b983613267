"""The last convolution of the codec's decoder: from channels to one sample per row, with tanh.

It is bound by memory bandwidth. `conv` would read every input once per tap, and use one of sixteen columns of the
tensor cores. Here a program reads its rows once and multiplies them with all taps. Sample t is then a sum over taps:
row t times the last tap, row t - 1 times the one before it, and so on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.codec_decoder.conv import Taps, conv_reference
from shoal.kernels.codec_decoder.packing import Packing
from shoal.kernels.jit import kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl

BLOCK_M = 128


def output_conv_reference(x: Tensor, taps: Taps, past: Tensor, packing: Packing) -> Tensor:
    """Convolve x [P, channels] with weight [taps, 1, channels] -> samples [P] in fp32, between -1 and 1."""
    weights = Taps(taps.weight.float(), taps.bias, taps.dilation)
    return torch.tanh(conv_reference(x.float(), weights, past.float(), packing)[0]).flatten()


@kernel("rate")
def _output_conv_kernel(
    x,
    weight,
    bias,
    past,
    slots,
    starts,
    out,
    rate,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IN: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    STEPS: tl.constexpr = TAPS - 1
    frame, first = tl.program_id(0), tl.program_id(1) * (BLOCK_M - STEPS)  # first sample of this program in its frame
    row, c, tap = tl.arange(0, BLOCK_M), tl.arange(0, PADDED), tl.arange(0, COLUMNS)
    # Slots and starts are uploaded by the host and written by no kernel: no need to wait for them.
    slot, start = tl.load(slots + frame).to(tl.int64), tl.load(starts + frame)
    w_mask = (c < IN)[:, None] & (tap < TAPS)[None, :]
    w = tl.load(weight + tap[None, :] * IN + c[:, None], mask=w_mask, other=0.0)
    # Rows before the first of the stream are its left context.
    time = (frame - start) * rate + first - STEPS + row
    new_ptrs = x + (start * rate + time)[:, None] * IN + c[None, :]
    past_ptrs = past + (slot * STEPS + STEPS + time)[:, None] * IN + c[None, :]
    mask = (first - STEPS + row < rate)[:, None] & (c < IN)[None, :]
    if PDL:
        launch_dependents_and_wait()
    x_tile = tl.load(tl.where((time >= 0)[:, None], new_ptrs, past_ptrs), mask=mask, other=0.0)
    products = tl.dot(x_tile, w, input_precision="ieee")  # products of every row with every tap
    later = tl.minimum(row[:, None] + tap[None, :], BLOCK_M - 1)
    shifted = tl.where((tap < TAPS)[None, :], tl.gather(products, later, 0), 0.0)
    y = tl.sum(shifted, axis=1) + tl.load(bias)
    samples = out + frame * rate + first + row
    tl.store(samples, 1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0), mask=(row < BLOCK_M - STEPS) & (first + row < rate))


def output_conv(x: Tensor, taps: Taps, past: Tensor, packing: Packing, out: Tensor) -> None:
    """Compute `output_conv_reference` without dilation, in one launch, into `out`."""
    channels, count, rate, pdl = x.shape[1], len(taps.weight), packing.rate(x), supports_pdl(x.device)
    assert taps.dilation == 1
    assert taps.weight.shape[1] == 1
    _output_conv_kernel[(len(packing.slots), -(-rate // (BLOCK_M - count + 1)))](
        x,
        taps.weight,
        taps.bias,
        past,
        packing.slots,
        packing.starts,
        out,
        rate,
        TAPS=count,
        COLUMNS=max(16, next_power_of_two(count)),
        IN=channels,
        PADDED=max(16, next_power_of_two(channels)),
        BLOCK_M=BLOCK_M,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
