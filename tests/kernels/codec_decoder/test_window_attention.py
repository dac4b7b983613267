import pytest
import torch

from shoal.kernels.codec_decoder.window_attention import (
    count_steps,
    count_steps_reference,
    window_attention,
    window_attention_reference,
)
from shoal.kernels.rope import rope_table
from tests.kernels.codec_decoder.packs import pack


@pytest.mark.parametrize("chunks", [[(1, 2), (1, 1), (3, 4)], [(5, 1), (20, 32), (2, 2)]])
def test_steps_see_the_window_of_their_own_stream(
    chunks: list[tuple[int, int]], dtype: torch.dtype, device: str, close: float
) -> None:
    heads, d, window, ring = 2, 32, 12, 44
    rope = rope_table(200, d, 1e4, device)
    rings = [torch.zeros(7, heads, ring, d, dtype=dtype, device=device) for _ in range(4)]
    seen = torch.tensor([0, 0, 0, 37, 0, 0, 0], device=device)
    rings[0].normal_()
    rings[1].normal_()
    rings[2].copy_(rings[0])
    rings[3].copy_(rings[1])
    for one, other in chunks:
        packing = pack([(3, one), (1, other)], device, frames=one + other + 1)
        qkv = torch.randn(one + other + 1, 3 * heads * d, device=device).to(dtype)
        ours = window_attention(qkv, rope, seen, packing, rings[0], rings[1], window)
        reference = window_attention_reference(qkv, rope, seen, packing, rings[2], rings[3], window)
        torch.testing.assert_close(ours, reference, atol=close, rtol=close)
        torch.testing.assert_close(rings[0], rings[2], atol=close, rtol=close)
        seen[3] += one
        seen[1] += other


def test_slots_count_the_steps_of_their_streams_but_not_padding(device: str) -> None:
    ours = torch.arange(7, device=device)
    theirs, packing = ours.clone(), pack([(3, 2), (0, 1), (5, 4)], device, frames=130)
    count_steps(ours, packing)
    count_steps_reference(theirs, packing)
    assert torch.equal(ours, theirs)
    assert ours.tolist() == [1, 1, 2, 5, 4, 9, 6]
