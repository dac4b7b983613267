import pytest
import torch

from shoal.kernels.linear.linear import linear, linear_reference, needs_regroup
from shoal.kernels.linear.split_k_linear import split_k_linear, split_k_linear_reference
from shoal.kernels.rms_norm import fused_rms_norm, rms_norm
from shoal.model.linear import quantize_rows

SHAPES = [(1, 48, 64), (3, 160, 100), (17, 64, 48), (70, 32, 16)]


def matrices(rows: int, columns: int, width: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, columns, device=device).to(dtype)
    return x, (torch.randn(width, columns, device=device) / columns**0.5).to(dtype)


@pytest.mark.parametrize(("rows", "columns", "width"), SHAPES)
@pytest.mark.parametrize("form", ["plain", "normed", "added", "gated"])
def test_the_fused_kernel_equals_the_separate_operators(
    rows: int, columns: int, width: int, form: str, dtype: torch.dtype, device: str, close: float
) -> None:
    x, weight = matrices(rows, columns, width, dtype, device)
    norm = torch.rand(columns, device=device).to(dtype) + 0.5
    residual = torch.randn(rows, width, device=device).to(dtype)
    options: dict[str, dict[str, object]] = {
        "plain": {},
        "normed": {"norm": norm, "eps": 1e-6},
        "added": {"residual": residual},
        "gated": {"norm": norm, "eps": 1e-6, "gated": True},
    }
    ours = linear(x, weight, **options[form])  # type: ignore[arg-type]
    reference = linear_reference(x, weight, **options[form])  # type: ignore[arg-type]
    assert ours.shape == reference.shape
    torch.testing.assert_close(ours, reference, atol=close, rtol=close)


def test_the_output_may_alias_the_residual(dtype: torch.dtype, device: str, close: float) -> None:
    x, weight = matrices(2, 32, 32, dtype, device)
    residual = torch.randn(2, 32, device=device).to(dtype)
    expected = linear_reference(x, weight, residual=residual)
    torch.testing.assert_close(linear(x, weight, residual=residual, out=residual), expected, atol=close, rtol=close)


def assert_rows_are_batch_invariant(x: torch.Tensor, weight: torch.Tensor) -> None:
    together = linear(x, weight)
    for row in (0, 4, 8):
        assert torch.equal(linear(x[row : row + 1], weight)[0], together[row])


def test_a_row_does_not_depend_on_the_rest_of_the_batch(dtype: torch.dtype, device: str) -> None:
    # Integers, whose sums are exact in any order: the interpreter multiplies with numpy's BLAS, whose order of sums
    # depends on the shape and the CPU.
    x, weight = (torch.randint(-8, 9, (rows, 64), device=device).to(dtype) for rows in (9, 32))
    assert_rows_are_batch_invariant(x, weight)


@pytest.mark.gpu
def test_on_a_gpu_a_row_is_bit_identical_in_any_batch(dtype: torch.dtype, device: str) -> None:
    assert_rows_are_batch_invariant(*matrices(9, 64, 32, dtype, device))


WEIGHT_DTYPES = [None, torch.int8, torch.float8_e4m3fn]


@pytest.mark.gpu  # the interpreter multiplies with numpy, whose order of sums depends on the shapes
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("columns", [256, 1024, 2560])
@pytest.mark.parametrize("form", ["normed", "added", "gated"])
def test_every_tile_gives_the_same_bits(form: str, columns: int, weight_dtype: torch.dtype | None, device: str) -> None:
    dtype = torch.bfloat16
    x, weight = matrices(70, columns, 64, dtype, device)
    weight, scales = (weight, None) if weight_dtype is None else quantize_rows(weight, weight_dtype)
    residual, norm = torch.randn(70, 64, device=device).to(dtype), torch.rand(columns, device=device).to(dtype)
    options = {
        "normed": {"norm": norm, "eps": 1e-6},
        "added": {"residual": residual},
        "gated": {"gated": True},
    }[form]
    together = linear(x, weight, scales=scales, **options)  # type: ignore[arg-type]
    for rows in (1, 2, 8, 9, 16, 17, 33):
        if form == "added":
            options["residual"] = residual[:rows].contiguous()
        ours = linear(x[:rows].contiguous(), weight, scales=scales, **options)  # type: ignore[arg-type]
        assert torch.equal(ours, together[:rows])


@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("rows", "columns", "width"), SHAPES[:3])
@pytest.mark.parametrize("gated", [False, True])
def test_quantized_weights_are_dequantized_in_the_kernel(
    weight_dtype: torch.dtype,
    rows: int,
    columns: int,
    width: int,
    gated: bool,
    dtype: torch.dtype,
    device: str,
    close: float,
) -> None:
    x, weight = matrices(rows, columns, width, dtype, device)
    small, scales = quantize_rows(weight, weight_dtype)
    ours = linear(x, small, scales=scales, gated=gated)
    reference = linear_reference(x, small, scales=scales, gated=gated)
    torch.testing.assert_close(ours, reference, atol=close, rtol=close)
    torch.testing.assert_close(ours, linear_reference(x, weight, gated=gated), atol=0.2, rtol=0.1)


@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_every_byte_is_dequantized_exactly(
    weight_dtype: torch.dtype, rows: int, dtype: torch.dtype, device: str
) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(weight_dtype)
    codes = codes[codes.float().isfinite()]
    weight = torch.zeros(len(codes), 128, device=device).to(weight_dtype)
    weight.view(torch.uint8)[:, 0] = codes.view(torch.uint8)
    x = torch.zeros(rows, 128, device=device, dtype=dtype)
    x[:, 0] = 1
    assert torch.equal(linear(x, weight)[-1].float(), codes.float())


@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 128, 64), (5, 384, 40), (20, 256, 33), (70, 128, 16)])
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=str)
def test_split_k_partials_are_reduced_by_the_following_norm(
    rows: int, columns: int, width: int, weight_dtype: torch.dtype | None, dtype: torch.dtype, device: str, close: float
) -> None:
    x, weight = matrices(rows, columns, width, dtype, device)
    small, scales = (weight, None) if weight_dtype is None else quantize_rows(weight, weight_dtype)
    partials = split_k_linear(x, small)
    torch.testing.assert_close(
        partials, split_k_linear_reference(x, small), atol=close * small.float().abs().max().item(), rtol=1e-3
    )
    stream, norm = torch.randn(rows, width, device=device).to(dtype), torch.rand(width, device=device).to(dtype) + 0.5
    expected = linear_reference(x, small, scales=scales, residual=stream)
    ours = fused_rms_norm(stream, norm, 1e-6, partials=partials, scales=scales)
    torch.testing.assert_close(stream, expected, atol=close, rtol=close)
    torch.testing.assert_close(ours, rms_norm(expected, norm, 1e-6), atol=2 * close, rtol=2 * close)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("columns", [1024, 4608])
def test_a_regrouped_k_gives_the_same_product(
    rows: int, columns: int, dtype: torch.dtype, device: str, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.kernels.linear.linear.has_wgmma", lambda device: True)
    x, weight = matrices(rows, columns, 32, dtype, device)
    weight, scales = quantize_rows(weight, torch.int8)
    assert needs_regroup(x, weight, 128) == (dtype != torch.float32)
    expected = linear_reference(x, weight, scales=scales)
    torch.testing.assert_close(linear(x, weight, scales=scales), expected, atol=close, rtol=close)
    partials, largest = split_k_linear(x, weight), weight.float().abs().max().item()
    torch.testing.assert_close(partials, split_k_linear_reference(x, weight), atol=close * largest, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("columns", [128, 1024, 3072, 9728])
def test_split_k_gives_the_bits_of_linear(columns: int, weight_dtype: torch.dtype | None, device: str) -> None:
    dtype = torch.bfloat16
    x, weight = matrices(70, columns, 64, dtype, device)
    weight, scales = (weight, None) if weight_dtype is None else quantize_rows(weight, weight_dtype)
    residual, norm = torch.randn(70, 64, device=device).to(dtype), torch.rand(64, device=device).to(dtype)
    together = linear(x, weight, residual=residual, scales=scales)
    for rows in (1, 2, 8, 9, 17, 33, 70):
        stream = residual[:rows].clone()
        fused_rms_norm(stream, norm, 1e-6, partials=split_k_linear(x[:rows].contiguous(), weight), scales=scales)
        assert torch.equal(stream, together[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [384, 1024, 2560])
def test_a_normed_sum_has_the_same_bits_with_and_without_split_k(dim: int, device: str) -> None:
    """More than 256 rows do not use split-K; rounding to bf16 hides most differences of a sum, but not in all rows."""
    x, weight = matrices(512, 1024, dim, torch.bfloat16, device)
    residual, norm = torch.randn(512, dim, device=device).bfloat16(), torch.rand(dim, device=device).bfloat16()
    whole = fused_rms_norm(linear(x, weight, residual=residual), norm, 1e-6)
    for rows in (1, 64, 256, 512):
        partials = split_k_linear(x[:rows].contiguous(), weight)
        assert torch.equal(fused_rms_norm(residual[:rows].clone(), norm, 1e-6, partials=partials), whole[:rows])
