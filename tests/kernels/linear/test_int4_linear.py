import pytest
import torch

from shoal.engine.execution.fused import ResidualStream, project
from shoal.kernels.linear.int4_linear import int4_linear, int4_linear_reference, int4_split_k_linear, supports_int4
from shoal.kernels.rms_norm import RMSNorm
from shoal.kernels.tile import Tile
from shoal.model.linear import Int4Linear, has_fused_kernels, quantize_groups


def layer(rows: int, width: int, dtype: torch.dtype, device: str, columns: int = 512) -> tuple[torch.Tensor, ...]:
    """Return x, weight and affine."""
    weight, affine = quantize_groups(torch.randn(width, columns, device=device) / columns**0.5, 128)
    return torch.randn(rows, columns, device=device).to(dtype), weight, affine


@pytest.mark.parametrize("rows", [1, 9, 17])
@pytest.mark.parametrize("form", ["plain", "added", "gated"])
def test_the_kernel_equals_the_dequantized_product(
    rows: int, form: str, dtype: torch.dtype, device: str, close: float
) -> None:
    x, weight, affine = layer(rows, 80, dtype, device)
    options: dict[str, object] = {"gated": {"gated": True}, "added": {"residual": torch.randn_like(x[:, :80])}}.get(
        form, {}
    )
    ours = int4_linear(x, weight, affine, **options)  # type: ignore[arg-type]
    reference = int4_linear_reference(x, weight, affine, **options)  # type: ignore[arg-type]
    assert ours.shape == (rows, 40 if form == "gated" else 80)
    torch.testing.assert_close(ours, reference, atol=close, rtol=close)


@pytest.mark.parametrize("columns", [512, 2048, 2560])
def test_the_partial_sums_of_the_quarters_add_up_to_the_product(columns: int, device: str) -> None:
    """Layers with 1, 4 and 5 groups per quarter of K, which do and do not divide by its four splits."""
    x, weight, affine = layer(2, 48, torch.float32, device, columns)
    partials = int4_split_k_linear(x, weight, affine)
    assert partials.shape == (4, 2, 48)
    torch.testing.assert_close(partials.sum(0), int4_linear_reference(x, weight, affine), atol=1e-5, rtol=1e-5)


def test_the_reference_equals_the_layer(device: str) -> None:
    x, weight, affine = layer(3, 32, torch.float32, device)
    plain = Int4Linear(512, 32, 128)
    plain.weight, plain.scales_and_zeros = weight, affine
    torch.testing.assert_close(int4_linear_reference(x, weight, affine), plain(x), atol=1e-5, rtol=1e-5)


def test_only_the_first_outputs_of_a_layer_can_be_computed(device: str) -> None:
    x, weight, affine = layer(1, 64, torch.float32, device)
    torch.testing.assert_close(int4_linear(x, weight[:32], affine), int4_linear(x, weight, affine)[:, :32])


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [512, 2560])
def test_on_a_gpu_a_row_is_bit_identical_in_any_batch(columns: int, dtype: torch.dtype, device: str) -> None:
    x, weight, affine = layer(70, 96, dtype, device, columns)
    together = int4_linear(x, weight, affine)
    for row in (0, 4, 69):
        assert torch.equal(int4_linear(x[row : row + 1], weight, affine)[0], together[row])
    assert torch.equal(int4_linear(x, weight, affine, tile=Tile(32, 32, 128, stages=2)), together)
    partials = int4_split_k_linear(x, weight, affine)
    assert torch.equal(int4_split_k_linear(x[4:5], weight, affine)[:, 0], partials[:, 4])


@pytest.mark.parametrize(
    ("columns", "group", "supported"), [(512, 128, True), (2560, 128, True), (1280, 128, False), (512, 64, False)]
)
def test_only_whole_groups_in_every_split_are_supported(columns: int, group: int, supported: bool) -> None:
    assert supports_int4(columns, group) == supported


def test_fused_layers_take_int4_weights(device: str) -> None:
    """The slow transformer's products, as `FusedFrame` calls them."""
    x, weight, affine = layer(3, 512, torch.float32, device)
    plain = Int4Linear(512, 512, 128)
    plain.weight, plain.scales_and_zeros = weight, affine
    assert has_fused_kernels(plain)
    torch.testing.assert_close(project(x, plain, 100), plain(x)[:, :100], atol=1e-5, rtol=1e-5)
    stream, norm = ResidualStream(x.clone()), RMSNorm(512, 1e-6).to(device)
    stream.add(x, plain)
    normed = stream.normed(norm)  # adds the partial sums
    torch.testing.assert_close(stream.x, x + plain(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normed, norm(x + plain(x)), atol=1e-5, rtol=1e-5)
