"""Products of many rows: the sequential form of `linear`, split-K, and their tiles."""

import pytest
import torch

from shoal.kernels.codec_decoder.conv import choose_tile as choose_conv_tile
from shoal.kernels.jit import HOPPER_SHARED_MEMORY
from shoal.kernels.linear.linear import linear, linear_reference
from shoal.kernels.linear.split_k_linear import split_k_linear, split_k_linear_reference
from shoal.kernels.linear.tiles import choose_tile
from shoal.kernels.tile import Tile
from shoal.model.linear import quantize_rows

SEQUENTIAL = Tile(64, 32, 32, sequential=True)


def matrices(rows: int, columns: int, width: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, columns, device=device).to(dtype)
    return x, (torch.randn(width, columns, device=device) / columns**0.5).to(dtype)


@pytest.mark.parametrize("weight_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("form", ["added", "gated"])
def test_the_sequential_form_equals_the_reference(
    form: str, weight_dtype: torch.dtype | None, dtype: torch.dtype, device: str, close: float
) -> None:
    rows = 64
    x, weight = matrices(rows, 256, 64, dtype, device)
    weight, scales = (weight, None) if weight_dtype is None else quantize_rows(weight, weight_dtype)
    options = {"gated": True} if form == "gated" else {"residual": torch.randn(rows, 64, device=device).to(dtype)}
    ours = linear(x, weight, scales=scales, tile=SEQUENTIAL, **options)  # type: ignore[arg-type]
    expected = linear_reference(x, weight, scales=scales, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, expected, atol=close, rtol=close)


def test_a_tile_that_does_not_divide_the_product_is_refused(dtype: torch.dtype, device: str) -> None:
    x, weight = matrices(70, 256, 64, dtype, device)
    with pytest.raises(ValueError, match="does not divide 70 rows"):
        linear(x, weight, tile=SEQUENTIAL)


@pytest.mark.parametrize(("width", "weight_dtype"), [(64, None), (64, torch.int8), (2560, torch.int8)], ids=str)
def test_split_k_of_whole_tiles_equals_the_reference(
    width: int, weight_dtype: torch.dtype | None, dtype: torch.dtype, device: str, close: float
) -> None:
    """Quantized weights of more than 2,304 outputs have their operands swapped."""
    x, weight = matrices(128, 128, width, dtype, device)
    weight = weight if weight_dtype is None else quantize_rows(weight, weight_dtype)[0]
    partials = split_k_linear(x, weight, tile=Tile(64, min(width, 512), 32))
    largest = weight.float().abs().max().item()
    torch.testing.assert_close(partials, split_k_linear_reference(x, weight), atol=close * largest, rtol=1e-3)


BATCHES = (1, 2, 8, 9, 16, 17, 24, 48, 64, 96, 128, 192, 256, 384)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("columns", "width", "gated"), [(1024, 4096, False), (1024, 3072, True), (2560, 6144, False), (2560, 9728, True)]
)
def test_a_row_has_the_same_bits_in_any_batch_at_the_released_sizes(
    columns: int, width: int, gated: bool, weight_dtype: torch.dtype | None, device: str
) -> None:
    """Results are not rounded to bf16, which would hide most differences."""
    x, weight = matrices(512, columns, 2 * width if gated else width, torch.bfloat16, device)
    weight, scales = (weight, None) if weight_dtype is None else quantize_rows(weight, weight_dtype)

    def product(rows: int) -> torch.Tensor:
        out = torch.empty(rows, width, device=device)
        return linear(x[:rows].contiguous(), weight, scales=scales, gated=gated, out=out)

    together = product(512)
    for rows in BATCHES:
        assert torch.equal(product(rows), together[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("columns", "width"), [(2048, 1024), (3072, 1024), (4096, 2560), (9728, 2560)])
def test_partial_sums_have_the_same_bits_in_any_batch_at_the_released_sizes(
    columns: int, width: int, weight_dtype: torch.dtype | None, device: str
) -> None:
    x, weight = matrices(512, columns, width, torch.bfloat16, device)
    weight = weight if weight_dtype is None else quantize_rows(weight, weight_dtype)[0]
    together = split_k_linear(x, weight)
    for rows in BATCHES:
        assert torch.equal(split_k_linear(x[:rows].contiguous(), weight), together[:, :rows]), rows


@pytest.mark.gpu
def test_products_of_the_codec_have_the_same_bits_in_any_batch(device: str) -> None:
    for columns, gated in ((1024, False), (1024, True)):
        x, weight = matrices(256, columns, 6144 if gated else 3072, torch.float16, device)
        together = linear(x, weight, gated=gated, out=torch.empty(256, 3072, device=device))
        for rows in BATCHES[:-1]:
            out = torch.empty(rows, 3072, device=device)
            assert torch.equal(linear(x[:rows].contiguous(), weight, gated=gated, out=out), together[:rows]), rows
    for columns in (1024, 3072):
        x, weight = matrices(256, columns, 1024, torch.float16, device)
        together = split_k_linear(x, weight)
        for rows in BATCHES[:-1]:
            assert torch.equal(split_k_linear(x[:rows].contiguous(), weight), together[:, :rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bit_weights_have_the_same_bits_in_any_batch_in_fp16(weight_dtype: torch.dtype, device: str) -> None:
    for columns, width in ((1024, 4096), (2560, 6144)):
        x, weight = matrices(256, columns, width, torch.float16, device)
        weight, scales = quantize_rows(weight, weight_dtype)
        together = linear(x, weight, scales=scales, out=torch.empty(256, width, device=device))
        for rows in (1, 8, 16, 24, 64):
            out = torch.empty(rows, width, device=device)
            assert torch.equal(linear(x[:rows].contiguous(), weight, scales=scales, out=out), together[:rows]), rows


def test_only_a_card_with_the_shared_memory_of_hopper_uses_the_sequential_form() -> None:
    for limit, expected in ((HOPPER_SHARED_MEMORY, True), (166_912, False), (101_376, False)):
        for rows, gated in ((256, False), (512, False), (128, True), (512, True)):
            tile = choose_tile(rows, 4096, 256, gated=gated, quantized=False, dtype=torch.bfloat16, shared_limit=limit)
            assert tile.sequential == expected


def test_a_smaller_card_keeps_small_tiles_of_convolutions() -> None:
    released = (65536, 384, 384, 7)
    assert choose_conv_tile(*released, HOPPER_SHARED_MEMORY) == Tile(128, 128, 64)
    assert choose_conv_tile(*released, 101_376) == Tile(64, 128, 64)


def test_convolutions_of_few_rows_have_small_tiles_on_every_card() -> None:
    for limit in (HOPPER_SHARED_MEMORY, 101_376):
        assert choose_conv_tile(64, 1536, 1024, 7, limit) == Tile(64, 32, 64, stages=6)
