import pytest
import torch

from shoal.kernels.rope import rope_table
from shoal.kernels.window_attention import window_attention, window_attention_reference
from tests.kernels.packs import pack


@pytest.mark.parametrize("pieces", [[(1, 2), (1, 1), (3, 4)], [(5, 1), (20, 32), (2, 2)]])
def test_steps_see_the_window_of_their_own_stream(
    pieces: list[tuple[int, int]], dtype: torch.dtype, device: str, close: float
) -> None:
    heads, d, window, ring = 2, 32, 12, 44
    rope = rope_table(200, d, 1e4, device)
    memories = [torch.zeros(7, ring, heads, d, dtype=dtype, device=device) for _ in range(4)]
    seen = torch.tensor([0, 0, 0, 37, 0, 0, 0], device=device)
    memories[0].normal_()
    memories[1].normal_()
    memories[2].copy_(memories[0])
    memories[3].copy_(memories[1])
    for one, other in pieces:
        packing = pack([(3, one), (1, other)], device, frames=one + other + 1)
        qkv = torch.randn(one + other + 1, 3 * heads * d, device=device).to(dtype)
        ours = window_attention(qkv, rope, seen, packing, memories[0], memories[1], window)
        reference = window_attention_reference(qkv, rope, seen, packing, memories[2], memories[3], window)
        torch.testing.assert_close(ours, reference, atol=close, rtol=close)
        torch.testing.assert_close(memories[0], memories[2], atol=close, rtol=close)
        seen[3] += one
        seen[1] += other
