"""Quantized KV cache: the kernels that write and read it, against their references."""

import pytest
import torch
from torch import Tensor

from shoal.kernels.attention.kv_quant import dequantize_kv, quantize_kv
from shoal.kernels.attention.paged_attention import paged_decode, paged_decode_reference, paged_prefill_reference
from shoal.kernels.attention.qkv import rope_and_cache, rope_and_cache_reference
from shoal.kernels.rope import rope_table

KV_DTYPES = [torch.int8, torch.float8_e4m3fn]


@pytest.fixture(params=KV_DTYPES, ids=str)
def kv_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


def kv_cache(kv_dtype: torch.dtype, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys, key_scales = quantize_kv(torch.randn(60, 4, 2, 16, device=device).to(dtype), kv_dtype)
    values, value_scales = quantize_kv(torch.randn(60, 4, 2, 16, device=device).to(dtype), kv_dtype)
    return keys, values, key_scales, value_scales


@pytest.mark.parametrize("normed", [False, True])
def test_new_tokens_are_written_like_the_reference(
    kv_dtype: torch.dtype, normed: bool, dtype: torch.dtype, device: str
) -> None:
    qkv = torch.randn(3, 8 * 16, device=device).to(dtype)
    norm = torch.rand(16, device=device).to(dtype) + 0.5 if normed else None
    positions, slots = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([3, 0, 49], [1, 0, 1]))
    tables = torch.zeros(2, 13, dtype=torch.int32, device=device)
    tables[0, 0], tables[1, 0], tables[1, 12] = 2, 1, 0
    ours, rope = kv_cache(kv_dtype, dtype, device), rope_table(50, 16, 1e6, device)
    reference = tuple(part.clone() for part in ours)
    for place, (keys, values, key_scales, value_scales) in (
        (rope_and_cache, ours),
        (rope_and_cache_reference, reference),
    ):
        scales = {"key_scales": key_scales, "value_scales": value_scales}
        place(qkv, norm, norm, 1e-6, rope, positions, keys, values, tables, slots, **scales)
    for index in (0, 1):
        torch.testing.assert_close(ours[2 + index], reference[2 + index], atol=0, rtol=2e-3)
        if kv_dtype == torch.float8_e4m3fn and device == "cpu":
            continue  # the interpreter loses the carry when it rounds to fp8
        got, expected = (dequantize_kv(each[index], each[2 + index], torch.float32) for each in (ours, reference))
        # Where the unquantized values differ in their last bits, a quantized one may round to the next step.
        torch.testing.assert_close(got, expected, atol=0.04, rtol=0.13)


def test_decode_reads_the_cache_like_the_reference(
    kv_dtype: torch.dtype, dtype: torch.dtype, device: str, close: float
) -> None:
    keys, values, key_scales, value_scales = kv_cache(kv_dtype, dtype, device)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    tables = torch.randint(0, 60, (4, 49), device=device)
    lengths = torch.tensor([1, 33, 17, 191], device=device)
    q, slots = torch.randn(4, 4, 16, device=device).to(dtype), torch.arange(4, dtype=torch.int32, device=device)
    ours = paged_decode(q, keys, values, tables, slots, (lengths - 1).int(), block_n=16, **scales)
    reference = paged_decode_reference(q, keys, values, tables, lengths, **scales)
    torch.testing.assert_close(ours, reference, atol=close, rtol=close)


def test_the_references_equal_attention_over_a_dequantized_cache(kv_dtype: torch.dtype) -> None:
    keys, values, key_scales, value_scales = kv_cache(kv_dtype, torch.float32, "cpu")
    wide = dequantize_kv(keys, key_scales, torch.float32), dequantize_kv(values, value_scales, torch.float32)
    table, q = torch.tensor([7, 3, 11]), torch.randn(10, 4, 16)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    small = paged_prefill_reference(q, keys, values, table, 10, **scales)
    torch.testing.assert_close(small, paged_prefill_reference(q, *wide, table, 10))
