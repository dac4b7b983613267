"""Attention of several prompt tokens per program: the bits of one token per program."""

import pytest
import torch

from shoal.kernels.attention.kv_quant import quantize_kv
from shoal.kernels.attention.paged_attention import paged_decode
from shoal.kernels.attention.prefill_attention import paged_prefill

BLOCKS, SIZE = 120, 4


def prompts(device: str, *spans: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots and positions of the rows of prompts (slot, first position, tokens), one after the other."""
    slots = torch.tensor([slot for slot, _, count in spans for _ in range(count)], dtype=torch.int32, device=device)
    positions = [first + at for _, first, count in spans for at in range(count)]
    return slots, torch.tensor(positions, dtype=torch.int32, device=device)


@pytest.mark.parametrize(("heads", "kv_heads", "d", "quantized"), [(4, 2, 16, False), (3, 1, 16, True)])
def test_prompt_tokens_have_the_bits_of_newest_tokens(
    heads: int, kv_heads: int, d: int, quantized: bool, dtype: torch.dtype, device: str
) -> None:
    keys, values = (torch.randn(BLOCKS, SIZE, kv_heads, d, device=device).to(dtype) for _ in range(2))
    scales = {}
    if quantized:
        (keys, key_scales), (values, value_scales) = (quantize_kv(each, torch.int8) for each in (keys, values))
        scales = {"key_scales": key_scales, "value_scales": value_scales}
    tables = torch.randint(0, BLOCKS, (4, 99), device=device).int()
    # Prompts that start and end inside a tile, across a split boundary (16 * 8 tokens), alone and as padding.
    slots, positions = prompts(device, (2, 0, 3), (0, 125, 6), (1, 150, 2), (3, 0, 1), (3, 0, 1))
    q = torch.randn(len(slots), heads, d, device=device).to(dtype)
    ours = paged_prefill(q, keys, values, tables, slots, positions, block_n=16, **scales)
    theirs = paged_decode(q, keys, values, tables, slots, positions, block_n=16, **scales)
    assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8)])
def test_the_released_sizes_have_the_bits_of_newest_tokens(heads: int, kv_heads: int, device: str) -> None:
    keys, values = (torch.randn(700, 16, kv_heads, 128, device=device).bfloat16() for _ in range(2))
    tables = torch.randperm(700, device=device)[: 2 * 200].view(2, 200).int()
    slots, positions = prompts(device, (0, 900, 300), (1, 0, 200), (0, 2900, 12))
    q = torch.randn(512, heads, 128, device=device).bfloat16()
    ours = paged_prefill(q, keys, values, tables, slots, positions)
    assert torch.equal(ours, paged_decode(q, keys, values, tables, slots, positions))
