import pytest
import torch

from shoal.kernels.codec_decoder.conv import (
    Taps,
    conv,
    conv_reference,
    depthwise_norm,
    depthwise_norm_reference,
    update_past,
    update_past_reference,
)
from tests.kernels.codec_decoder.packs import pack


def rows(count: int, channels: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(count, channels, device=device).to(dtype)


def past_of(slots: int, steps: int, channels: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(slots, steps, channels, device=device).to(dtype)


def some_taps(taps: int, width: int, channels: int, dilation: int, dtype: torch.dtype, device: str) -> Taps:
    weight = torch.randn(taps, width, channels, device=device) / (taps * channels) ** 0.5
    return Taps(weight.to(dtype), torch.randn(width, device=device), dilation)


@pytest.mark.parametrize(("taps", "dilation", "width", "channels"), [(7, 3, 24, 32), (2, 1, 48, 16), (1, 1, 1, 32)])
@pytest.mark.parametrize("form", ["plain", "added", "gelu"])
def test_a_convolution_continues_the_streams_of_its_slots(
    taps: int, dilation: int, width: int, channels: int, form: str, dtype: torch.dtype, device: str, close: float
) -> None:
    weights, packing = some_taps(taps, width, channels, dilation, dtype, device), pack([(4, 3), (0, 1), (5, 2)], device)
    x = rows(2 * 8, channels, dtype, device)  # two rows per frame
    past = past_of(7, weights.steps, channels, dtype, device) if taps > 1 else None
    options = {
        "plain": {"alpha": torch.rand(width, device=device) + 0.5},
        "added": {"residual": rows(len(x), width, dtype, device), "alpha": torch.rand(width, device=device) + 0.5},
        "gelu": {"activation": "gelu"},
    }[form]
    ours = conv(x, weights, past, packing, **options)  # type: ignore[arg-type]
    reference = conv_reference(x, weights, past, packing, **options)  # type: ignore[arg-type]
    for got, expected in zip(ours, reference, strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected, atol=close, rtol=close)


def test_snake_frequencies_repeat_over_the_phases_of_an_upsampling(
    dtype: torch.dtype, device: str, close: float
) -> None:
    packing, weights = pack([(1, 3), (0, 1)], device), some_taps(2, 12, 16, 1, dtype, device)
    x, past = rows(3 * 8, 16, dtype, device), past_of(7, 1, 16, dtype, device)
    alpha = torch.rand(4, device=device) + 0.5
    _, ours = conv(x, weights, past, packing, alpha=alpha, plain=False)
    _, expected = conv_reference(x, weights, past, packing, alpha=alpha)
    torch.testing.assert_close(ours, expected, atol=close, rtol=close)


@pytest.mark.parametrize("streams", [[(3, 1), (0, 2), (4, 5)], [(1, 8)], [(5, 1)]])
def test_the_left_context_of_every_stream_is_updated_and_padding_is_ignored(
    streams: list[tuple[int, int]], dtype: torch.dtype, device: str
) -> None:
    x, ours, packing = rows(2 * 8, 24, dtype, device), past_of(7, 6, 24, dtype, device), pack(streams, device)
    before, theirs = ours.clone(), ours.clone()
    update_past(x, ours, packing)
    update_past_reference(x, theirs, packing)
    assert torch.equal(ours, theirs)
    kept = {slot for slot, _ in streams}
    assert all(torch.equal(ours[slot], before[slot]) is (slot not in kept) for slot in range(7))


def assert_chunks_are_bit_identical_to_the_whole(x: torch.Tensor, weights: Taps, device: str) -> None:
    past = torch.zeros(7, 6, 32, dtype=x.dtype, device=device)
    whole, _ = conv(x, weights, past, pack([(0, 12)], device, frames=12))
    chunks = []
    for chunk in x.split([1, 4, 2, 5]):
        packing = pack([(0, len(chunk))], device, frames=len(chunk))
        chunks.append(conv(chunk.contiguous(), weights, past, packing)[0])
        update_past(chunk.contiguous(), past, packing)
    assert torch.equal(torch.cat(chunks), whole)


def test_chunks_of_a_stream_are_bit_identical_to_the_whole(dtype: torch.dtype, device: str) -> None:
    # Integers, whose sums are exact in any order: the interpreter multiplies with numpy's BLAS, whose order of sums
    # depends on the shape and the CPU.
    x, weight = (torch.randint(-8, 9, shape, device=device).to(dtype) for shape in ((12, 32), (7, 16, 32)))
    bias = torch.randint(-8, 9, (16,), device=device).float()
    assert_chunks_are_bit_identical_to_the_whole(x, Taps(weight, bias, 1), device)


@pytest.mark.gpu
def test_on_a_gpu_chunks_are_bit_identical_with_rounding_sums(dtype: torch.dtype, device: str) -> None:
    assert_chunks_are_bit_identical_to_the_whole(
        rows(12, 32, dtype, device), some_taps(7, 16, 32, 1, dtype, device), device
    )


def test_a_depthwise_convolution_is_normalized_over_the_channels(dtype: torch.dtype, device: str, close: float) -> None:
    x, past, packing = rows(3 * 8, 20, dtype, device), past_of(7, 6, 20, dtype, device), pack([(2, 1), (0, 5)], device)
    weight = torch.randn(7, 20, device=device).to(dtype)
    bias, scale, shift = (torch.randn(20, device=device) for _ in range(3))
    ours = depthwise_norm(x, weight, bias, scale, shift, 1e-6, past, packing)
    reference = depthwise_norm_reference(x, weight, bias, scale, shift, 1e-6, past, packing)
    torch.testing.assert_close(ours, reference, atol=close, rtol=close)
