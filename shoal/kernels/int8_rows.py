"""Rows of activations as int8 with one scale per row, the inputs of `linear` and `split_k_linear` in the mode `w8a8`.

Sums of int8 products are integers, so a row has the same bits with any tile, any split of K and any batch size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.kernels.jit import jit, kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl


class Int8Rows(NamedTuple):
    """Quantized rows: x = values * scales[:, None], where x had `dtype`."""

    values: Tensor  # [rows, columns] int8
    scales: Tensor  # [rows] fp32
    dtype: torch.dtype

    @classmethod
    def empty_like(cls, x: Tensor) -> Int8Rows:
        scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
        return cls(torch.empty_like(x, dtype=torch.int8), scales, x.dtype)


def int8_rows_reference(x: Tensor) -> Int8Rows:
    """Quantize rows x [rows, columns] symmetrically to -127..127; a row of zeros has scale 0."""
    row_max = x.float().abs().amax(-1, keepdim=True)
    values = (x.float() * (127.0 / row_max).nan_to_num(posinf=0.0)).round()
    return Int8Rows(values.to(torch.int8), (row_max / 127.0).squeeze(-1), x.dtype)


@jit
def quantize_row(row):
    """Quantize one row of fp32 values: returns int8 values and the scale."""
    top = tl.max(tl.abs(row), axis=0)
    factor = tl.where(top > 0, tl.div_rn(127.0, tl.where(top > 0, top, 1.0)), 0.0)
    # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
    values = (row * factor + 12582912.0) - 12582912.0
    return values.to(tl.int8), tl.div_rn(top, 127.0)


@kernel()
def _int8_rows_kernel(x, values, scales, K: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    k = tl.arange(0, PADDED)
    offset = tl.program_id(0) * K + k
    if PDL:
        launch_dependents_and_wait()
    row = tl.load(x + offset, mask=k < K, other=0.0).to(tl.float32)
    quantized, scale = quantize_row(row)
    tl.store(values + offset, quantized, mask=k < K)
    tl.store(scales + tl.program_id(0), scale)


def int8_rows(x: Tensor) -> Int8Rows:
    """Compute `int8_rows_reference` of contiguous rows x in one launch."""
    out, pdl, padded = Int8Rows.empty_like(x), supports_pdl(x.device), next_power_of_two(x.shape[1])
    _int8_rows_kernel[(len(x),)](
        x,
        out.values,
        out.scales,
        K=x.shape[1],
        PADDED=padded,
        PDL=pdl,
        num_warps=max(4, min(16, padded // 512)),
        launch_pdl=pdl,
    )
    return out
