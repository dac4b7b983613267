import pytest
import torch

from shoal.kernels.attention.qkv import rope_and_cache, rope_and_cache_reference
from shoal.kernels.rope import rope_table


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 16), (2, 2, 8), (16, 8, 32)])
def test_queries_are_returned_and_keys_and_values_are_written_to_their_blocks(
    normed: bool, heads: int, kv_heads: int, d: int, dtype: torch.dtype, device: str, close: float
) -> None:
    qkv = torch.randn(3, (heads + 2 * kv_heads) * d, device=device).to(dtype)
    norm = torch.rand(d, device=device).to(dtype) + 0.5 if normed else None
    table = rope_table(50, d, 1e6, device)
    positions, slots = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([3, 0, 49], [1, 0, 1]))
    tables = torch.zeros(2, 13, dtype=torch.int32, device=device)
    tables[0, 0], tables[1, 0], tables[1, 12] = 2, 1, 0
    caches = [torch.full((3, 4, kv_heads, d), 7.0, dtype=dtype, device=device) for _ in range(4)]
    where = tables, slots
    ours = rope_and_cache(qkv, norm, norm, 1e-6, table, positions, caches[0], caches[1], *where)
    reference = rope_and_cache_reference(qkv, norm, norm, 1e-6, table, positions, caches[2], caches[3], *where)
    for got, expected in ((ours, reference), (caches[0], caches[2]), (caches[1], caches[3])):
        torch.testing.assert_close(got, expected, atol=close, rtol=close)
    untouched = [token for token in range(12) if token not in (7, 8, 1)]
    assert (caches[0].flatten(0, 1)[untouched] == 7.0).all()
    assert (caches[1].flatten(0, 1)[untouched] == 7.0).all()
