import pytest
import torch

from shoal.kernels.embed import embed_tokens, embed_tokens_reference


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dim", [48, 640])
def test_a_token_embedding_is_the_sum_of_its_lookups(scaled: bool, dim: int, dtype: torch.dtype, device: str) -> None:
    tokens = torch.randint(0, 20, (5, 4), device=device)
    tokens[:, 0] = torch.tensor([3, 50, 69, 70, 49], device=device)
    slots = torch.tensor([4, 0, 1, 2, 3, 1], dtype=torch.int32, device=device)
    ids, codes = (torch.randn(size, dim, device=device).to(dtype) for size in (80, 60))
    ours = embed_tokens(tokens, slots, ids, codes, 50, 69, scaled)
    reference = embed_tokens_reference(tokens, slots, ids, codes, 50, 69, scaled)
    assert torch.allclose(ours, reference, atol=1e-6 if dtype is torch.float32 else 0.02)
