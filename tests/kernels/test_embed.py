import pytest
import torch

from shoal.kernels.embed import embed_tokens, embed_tokens_reference


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dim", [48, 640])
def test_a_column_is_the_sum_of_its_entries(scaled: bool, dim: int, dtype: torch.dtype, device: str) -> None:
    newest = torch.randint(0, 20, (5, 4), device=device)
    newest[:, 0] = torch.tensor([3, 50, 69, 70, 49], device=device)
    slots = torch.tensor([4, 0, 1, 2, 3, 1], dtype=torch.int32, device=device)
    main, codes = (torch.randn(size, dim, device=device).to(dtype) for size in (80, 60))
    ours = embed_tokens(newest, slots, main, codes, 50, 69, scaled)
    reference = embed_tokens_reference(newest, slots, main, codes, 50, 69, scaled)
    assert torch.allclose(ours, reference, atol=1e-6 if dtype is torch.float32 else 0.02)
