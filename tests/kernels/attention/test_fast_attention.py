import torch

from shoal.kernels.attention.fast_attention import fast_attention, fast_attention_reference
from shoal.kernels.rope import rope_table


def test_a_whole_frame_position_by_position_equals_the_reference(dtype: torch.dtype, device: str, close: float) -> None:
    heads, kv_heads, d, rows, codebooks = 4, 2, 8, 3, 10
    table = rope_table(codebooks, d, 1e6, device)
    ours, theirs = (
        [torch.zeros(rows, kv_heads, codebooks, d, dtype=dtype, device=device) for _ in range(2)] for _ in range(2)
    )
    for position in range(codebooks):
        qkv = torch.randn(rows, (heads + 2 * kv_heads) * d, device=device).to(dtype)
        got = fast_attention(qkv, table, position, *ours)
        expected = fast_attention_reference(qkv, table, position, *theirs)
        torch.testing.assert_close(got, expected, atol=close, rtol=close)
    torch.testing.assert_close(ours[0], theirs[0], atol=close, rtol=close)
    torch.testing.assert_close(ours[1], theirs[1], atol=0, rtol=0)
