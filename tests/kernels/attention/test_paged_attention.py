from functools import partial

import pytest
import torch
from torch.nn import functional as F

from shoal.kernels.attention.paged_attention import paged_decode, paged_decode_reference, paged_prefill_reference


def kv_cache(kv_heads: int, d: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (120, 4, kv_heads, d)
    return torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("block_n", [16, 32, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 16), (2, 2, 32)])
def test_the_kernel_equals_the_reference_over_ragged_lengths(
    block_n: int, heads: int, kv_heads: int, d: int, dtype: torch.dtype, device: str, close: float
) -> None:
    keys, values = kv_cache(kv_heads, d, dtype, device)
    tables = torch.randint(0, 120, (4, 99), device=device)
    lengths = torch.tensor([1, 33, 17, 391], device=device)
    q = torch.randn(4, heads, d, device=device).to(dtype)
    slots = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=device)
    ours = paged_decode(q, keys, values, tables, slots, (lengths - 1).int(), block_n=block_n)
    reference = paged_decode_reference(q, keys, values, tables[slots.long()], lengths)
    torch.testing.assert_close(ours, reference, atol=close, rtol=close)


def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, device: str) -> None:
    keys, values = kv_cache(2, 16, dtype, device)
    tables = torch.randint(0, 120, (3, 99), device=device)
    lengths = torch.tensor([5, 300, 12], device=device)
    q = torch.randn(3, 4, 16, device=device).to(dtype)
    slots = torch.arange(3, dtype=torch.int32, device=device)
    together = paged_decode(q, keys, values, tables, slots, lengths - 1, block_n=16)
    for row in range(3):
        one = slice(row, row + 1)
        alone = paged_decode(q[one], keys, values, tables, slots[one], lengths[one] - 1, block_n=16)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("kv_heads", [1, 2], ids=["first block prefetched", "no prefetch"])
def test_one_program_per_split_and_one_for_all_splits_give_the_same_bits(
    kv_heads: int, dtype: torch.dtype, device: str
) -> None:
    keys, values = kv_cache(kv_heads, 16, dtype, device)
    tables = torch.randint(0, 120, (20, 99), device=device)
    positions = torch.randint(0, 200, (20,), dtype=torch.int32, device=device)  # up to two blocks in each split
    q = torch.randn(20, 2 * kv_heads, 16, device=device).to(dtype)
    slots = torch.arange(20, dtype=torch.int32, device=device)
    together = paged_decode(q, keys, values, tables, slots, positions, block_n=16)
    split = paged_decode(q[:16], keys, values, tables, slots[:16], positions[:16], block_n=16)
    assert torch.equal(split, together[:16])


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(16, 8, 128), (32, 8, 128), (6, 2, 64), (4, 2, 32)])
def test_rows_of_released_sizes_have_the_same_bits_with_and_without_prefetch(
    heads: int, kv_heads: int, d: int, kv: str
) -> None:
    """One and two rows prefetch, with two programs per split; 16 have one per split, 17 one for all splits."""
    torch.manual_seed(0)
    shape, decode = (800, 16, kv_heads, d), paged_decode
    keys, values = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    if kv != "bfloat16":
        dtype = torch.int8 if kv == "int8" else torch.float8_e4m3fn
        keys, values = ((each * 20).to(dtype) for each in (keys, values))
        factors = torch.rand(2, *shape[:-1], device="cuda").half() / 20
        decode = partial(paged_decode, key_scales=factors[0], value_scales=factors[1])
    tables = torch.randint(0, 800, (17, 200), dtype=torch.int32, device="cuda")
    positions = torch.tensor([3000, 0, 127, 128, 1023, 1024, 2047, 1500, *range(40, 49)], device="cuda").int()
    q = torch.randn(17, heads, d, device="cuda").bfloat16()
    slots = torch.arange(17, dtype=torch.int32, device="cuda")
    together = decode(q, keys, values, tables, slots, positions)
    for size in (1, 2, 16):
        for rows in slots.long().split(size):
            ours = decode(q[rows], keys, values, tables, slots[rows], positions[rows])
            assert torch.equal(ours, together[rows]), (size, rows.tolist())


def test_the_references_equal_attention_over_a_contiguous_cache() -> None:
    torch.manual_seed(0)
    keys, values = kv_cache(2, 16, torch.float32, "cpu")
    table = torch.tensor([7, 3, 11])
    k, v = (x[table].flatten(0, 1)[:10].transpose(0, 1)[None] for x in (keys, values))
    q = torch.randn(10, 4, 16)
    whole = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True, enable_gqa=True)[0]
    torch.testing.assert_close(paged_prefill_reference(q, keys, values, table, 10), whole.transpose(0, 1))
    torch.testing.assert_close(paged_prefill_reference(q[7:], keys, values, table, 10), whole.transpose(0, 1)[7:])
    last = paged_decode_reference(q[9:], keys, values, table[None], torch.tensor([10]))
    torch.testing.assert_close(last, whole.transpose(0, 1)[9:])
