import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels.rms_norm import RMSNorm, rms_norm


def test_the_result_has_unit_power_before_the_weight() -> None:
    x = 5 * torch.randn(7, 64)
    normed = rms_norm(x, torch.ones(64), 1e-6)
    torch.testing.assert_close(normed.square().mean(-1), torch.ones(7))


def test_it_agrees_with_torch_in_fp32() -> None:
    x, weight = torch.randn(5, 48), torch.rand(48)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (48,), weight, 1e-5))


def test_in_bf16_it_rounds_before_it_multiplies_by_the_weight() -> None:
    """The released models round in this order, and the other order gives other bits."""
    x, weight = torch.randn(64, 256).bfloat16(), (1 + torch.rand(256)).bfloat16()
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), wide.bfloat16() * weight)
    assert not torch.equal(rms_norm(x, weight, 1e-6), (wide * weight.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_of_the_input_is_kept(dtype: torch.dtype) -> None:
    assert RMSNorm(8, 1e-6).to(dtype)(torch.ones(2, 8, dtype=dtype)).dtype == dtype


def test_zeros_stay_zeros() -> None:
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


@settings(deadline=None)
@given(scale=st.floats(1e-2, 1e3))
def test_the_scale_of_the_input_does_not_matter(scale: float) -> None:
    x = torch.linspace(-1, 1, 32)[None]
    torch.testing.assert_close(
        rms_norm(x * scale, torch.ones(32), 1e-12), rms_norm(x, torch.ones(32), 1e-12), rtol=1e-5, atol=1e-6
    )
