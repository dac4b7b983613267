import pytest
import torch

from shoal.kernels.sample import sample, sample_reference


def settings(rows: int, device: str) -> dict[str, torch.Tensor]:
    return {
        "penalty": torch.rand(rows, device=device) + 0.7,
        "temperature": torch.rand(rows, device=device) * 1.5 + 1e-6,
        "top_p": torch.rand(rows, device=device) * 0.98 + 0.02,
        "top_k": torch.randint(1, 60, (rows,), device=device),
        "seed": torch.randint(0, 2**32, (rows,), device=device),
        "frame": torch.randint(0, 1000, (rows,), device=device),
    }


@pytest.mark.parametrize("size", [40, 1024, 1025])
@pytest.mark.parametrize("penalised", [0, 5])
def test_the_kernel_draws_what_the_reference_draws(size: int, penalised: int, dtype: torch.dtype, device: str) -> None:
    for lane in range(3):
        logits = (3 * torch.randn(8, size, device=device)).to(dtype)
        columns = torch.randint(0, size + 1, (8, penalised), device=device)
        rows = settings(8, device)
        ours = sample(logits, columns, lane=lane, **rows)
        assert torch.equal(ours, sample_reference(logits, columns, lane=lane, **rows))


def test_without_limits_every_token_can_be_drawn(device: str) -> None:
    rows = 64
    open_settings = settings(rows, device) | {
        "top_p": torch.ones(rows, device=device),
        "top_k": torch.full((rows,), 2**31, device=device),
        "temperature": torch.ones(rows, device=device),
    }
    nobody = torch.zeros(rows, 0, dtype=torch.long, device=device)
    drawn = sample(torch.zeros(rows, 8, device=device), nobody, lane=0, **open_settings)
    assert set(drawn.tolist()) == set(range(8))


def test_the_likeliest_survives_the_narrowest_nucleus(device: str) -> None:
    logits = torch.randn(5, 100, device=device)
    narrow = settings(5, device) | {"top_p": torch.full((5,), 1e-6, device=device)}
    nobody = torch.zeros(5, 0, dtype=torch.long, device=device)
    assert torch.equal(sample(logits, nobody, lane=1, **narrow), logits.argmax(-1))
