"""Products of int8 rows with int8 weights: integers, so every tile and batch size must give exactly the same bits."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.int8_rows import Int8Rows, int8_rows, int8_rows_reference
from shoal.kernels.jit import HOPPER_SHARED_MEMORY
from shoal.kernels.linear.int8_tiles import int8_split_k_tile, int8_tile
from shoal.kernels.linear.linear import linear
from shoal.kernels.linear.split_k_linear import split_k_linear
from shoal.kernels.rms_norm import fused_rms_norm, int8_rms_norm
from shoal.model.linear import W8A8Linear, quantize_rows

SMALL_CARD = 101_376
# (outputs, inputs, gated) of the layers of S1-mini and S2-Pro.
LAYERS = ((4096, 1024, False), (3072, 1024, True), (6144, 2560, False), (9728, 2560, True))
SPLIT_LAYERS = ((1024, 2048), (1024, 3072), (2560, 4096), (2560, 9728))


def operands(rows: int, columns: int, width: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of different sizes, and int8 weights with their scales."""
    x = torch.randn(rows, columns, device=device) * torch.linspace(0.1, 3.0, rows, device=device)[:, None]
    return x, *quantize_rows(torch.randn(width, columns, device=device) / columns**0.5, torch.int8)


def sums(rows: Int8Rows, weight: Tensor) -> Tensor:
    """Return the products as exact integers: float64 represents them all."""
    return (rows.values.double() @ weight.double().T).to(torch.int32)


def scaled(rows: Int8Rows, weight: Tensor, scales: Tensor) -> Tensor:
    return sums(rows, weight).float() * rows.scales[:, None] * scales.float()


def equal(ours: Int8Rows, reference: Int8Rows) -> bool:
    """Compare bits; a GPU multiplies and adds in one rounding, which may decide ties differently."""
    if not ours.values.is_cuda:
        return torch.equal(ours.values, reference.values) and torch.equal(ours.scales, reference.scales)
    unlike = (ours.values.int() - reference.values.int()).abs()
    close = torch.allclose(ours.scales, reference.scales, rtol=1e-6, atol=0)
    return close and int(unlike.max()) <= 1 and float((unlike > 0).float().mean()) <= 0.05


def assert_same(ours: Tensor, expected: Tensor) -> None:
    """Compare bits; a GPU fuses the last multiplication with the addition of the residual."""
    rounding = 1e-6 if ours.is_cuda else 0
    torch.testing.assert_close(ours, expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("columns", [64, 100])
def test_rows_are_quantized_like_the_reference(columns: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(5, columns, device=device).to(dtype)
    x[2] = 0
    x[3, :3] = torch.tensor([127.0, 2.5, -3.5])  # ties are rounded to even
    ours = int8_rows(x)
    assert equal(ours, int8_rows_reference(x))
    assert ours.dtype == dtype
    assert not ours.values[2].any()
    assert ours.scales[2] == 0


def test_ties_are_rounded_to_even(device: str) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 126.5]], device=device)
    assert int8_rows(x).values.tolist() == [[127, 0, 2, 2, 0, -2, -127, 126]]


@pytest.mark.parametrize(
    ("rows", "columns", "width"), [(1, 128, 64), (3, 100, 48), (9, 384, 96), (17, 256, 64), (70, 160, 32)]
)
def test_products_are_exact(rows: int, columns: int, width: int, device: str) -> None:
    x, weight, scales = operands(rows, columns, width, device)
    quantized, residual = int8_rows(x), torch.randn(rows, width, device=device)
    expected = scaled(quantized, weight, scales)
    assert_same(linear(quantized, weight, scales=scales), expected)
    assert_same(linear(quantized, weight, scales=scales, residual=residual), residual + expected)
    gate, up = expected.chunk(2, dim=1)
    gated = linear(quantized, weight, scales=scales, gated=True)
    torch.testing.assert_close(gated, F.silu(gate) * up, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (9, 384), (17, 512), (40, 128), (70, 256)])
def test_split_k_partials_are_integers_that_the_norm_scales(rows: int, columns: int, device: str) -> None:
    x, weight, scales = operands(rows, columns, 64, device)
    quantized = int8_rows(x)
    partials = split_k_linear(quantized, weight)
    assert torch.equal(partials.sum(0, dtype=torch.int32), sums(quantized, weight))
    stream, norm = torch.randn(rows, 64, device=device), torch.rand(64, device=device)
    options = {"partials": partials, "scales": scales, "row_scales": quantized.scales}
    added, again = stream.clone(), stream.clone()
    normed = fused_rms_norm(added, norm, 1e-6, **options)
    assert_same(added, stream + scaled(quantized, weight, scales))
    assert equal(int8_rms_norm(again, norm, 1e-6, **options), int8_rows_reference(normed))
    assert torch.equal(again, added)


def test_the_layer_without_kernels_computes_the_same_up_to_rounding(
    dtype: torch.dtype, device: str, close: float
) -> None:
    x, weight, scales = operands(4, 128, 32, device)
    layer = W8A8Linear.from_quantized(weight, scales)
    ours = linear(int8_rows(x.to(dtype)), weight, scales=scales)
    torch.testing.assert_close(layer(x.to(dtype)), ours, atol=close, rtol=max(close, 1e-6))


def test_the_layer_without_kernels_does_not_overflow_in_float16() -> None:
    layer = W8A8Linear.from_quantized(torch.full((2, 2560), 127, dtype=torch.int8), torch.full((2,), 1e-4))
    y = layer(torch.full((1, 2560), 0.01, dtype=torch.float16))
    torch.testing.assert_close(y, torch.full((1, 2), 2560 * 127 * 1e-4 * 0.01, dtype=torch.float16), atol=0, rtol=2e-3)


def test_tiles_fit_small_cards_and_divide_the_inputs() -> None:
    for rows, (n, k, gated) in product((1, 8, 16, 17, 32, 64, 100, 128, 200, 256, 512), LAYERS):
        for limit in (SMALL_CARD, HOPPER_SHARED_MEMORY):
            tile = int8_tile(rows, n, k, gated=gated, shared_limit=limit)
            assert (tile.block_m + tile.block_n * (1 + gated)) * tile.block_k * tile.stages <= limit or rows <= 16
            assert tile.block_m > 16 or k // 4 % tile.block_k == 0
    for rows, (n, k) in product((1, 8, 16, 17, 32, 64, 100, 128, 200, 256), SPLIT_LAYERS):
        tile = int8_split_k_tile(rows, n, k // 4, SMALL_CARD)
        assert (tile.block_m + tile.block_n) * tile.block_k * tile.stages <= SMALL_CARD or rows <= 16


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "gated"), LAYERS)
def test_released_layers_have_the_same_bits_in_any_batch(n: int, k: int, gated: bool) -> None:
    x, weight, scales = operands(512, k, 2 * n if gated else n, "cuda")
    quantized = int8_rows(x.bfloat16())
    together = linear(quantized, weight, scales=scales, gated=gated)
    if not gated:
        assert torch.equal(together, scaled(quantized, weight, scales).bfloat16())
    for rows in (1, 2, 8, 9, 16, 17, 24, 32, 64, 96, 128, 256, 384):
        part = Int8Rows(quantized.values[:rows], quantized.scales[:rows], quantized.dtype)
        assert torch.equal(linear(part, weight, scales=scales, gated=gated), together[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SPLIT_LAYERS)
def test_released_split_k_layers_are_exact_in_any_batch(n: int, k: int) -> None:
    x, weight, _ = operands(256, k, n, "cuda")
    quantized = int8_rows(x.bfloat16())
    expected = sums(quantized, weight)
    for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64, 96, 128, 256):
        part = Int8Rows(quantized.values[:rows], quantized.scales[:rows], quantized.dtype)
        assert torch.equal(split_k_linear(part, weight).sum(0, dtype=torch.int32), expected[:rows]), rows
