import pytest
import torch

from shoal.kernels.conv import (
    Taps,
    conv,
    conv_reference,
    depthwise_norm,
    depthwise_norm_reference,
    remember,
    remember_reference,
)


def stream(rows: int, length: int, channels: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(rows, length, channels, device=device).to(dtype)


def some_taps(taps: int, width: int, channels: int, dilation: int, dtype: torch.dtype, device: str) -> Taps:
    weight = torch.randn(taps, width, channels, device=device) / (taps * channels) ** 0.5
    return Taps(weight.to(dtype), torch.randn(width, device=device), dilation)


@pytest.mark.parametrize(("taps", "dilation", "width", "channels"), [(7, 3, 24, 32), (2, 1, 48, 16), (1, 1, 1, 32)])
@pytest.mark.parametrize("form", ["plain", "added", "gelu", "tanh"])
def test_a_convolution_continues_the_streams_of_its_slots(
    taps: int, dilation: int, width: int, channels: int, form: str, dtype: torch.dtype, device: str, close: float
) -> None:
    x, weights = stream(3, 5, channels, dtype, device), some_taps(taps, width, channels, dilation, dtype, device)
    past = stream(6, weights.steps, channels, dtype, device) if taps > 1 else None
    slots = torch.tensor([4, 0, 5], dtype=torch.int32, device=device)
    options = {
        "plain": {"alpha": torch.rand(width, device=device) + 0.5},
        "added": {"residual": stream(3, 5, width, dtype, device), "alpha": torch.rand(width, device=device) + 0.5},
        "gelu": {"activation": "gelu"},
        "tanh": {"activation": "tanh"},
    }[form]
    ours = conv(x, weights, past, slots, **options)  # type: ignore[arg-type]
    reference = conv_reference(x, weights, past, slots, **options)  # type: ignore[arg-type]
    for got, expected in zip(ours, reference, strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected, atol=close, rtol=close)


def test_the_frequencies_of_snake_repeat_over_the_outputs_of_an_upsampling(
    dtype: torch.dtype, device: str, close: float
) -> None:
    x, weights = stream(2, 3, 16, dtype, device), some_taps(2, 12, 16, 1, dtype, device)
    past, slots = stream(2, 1, 16, dtype, device), torch.tensor([1, 0], dtype=torch.int32, device=device)
    alpha = torch.rand(4, device=device) + 0.5
    _, ours = conv(x, weights, past, slots, alpha=alpha, plain=False)
    _, expected = conv_reference(x, weights, past, slots, alpha=alpha)
    torch.testing.assert_close(ours, expected, atol=close, rtol=close)


@pytest.mark.parametrize("length", [2, 8])
def test_the_last_real_inputs_are_kept_whatever_was_padded(length: int, dtype: torch.dtype, device: str) -> None:
    x, ours = stream(3, length, 24, dtype, device), stream(5, 6, 24, dtype, device)
    theirs = ours.clone()
    slots, lengths = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([3, 0, 4], [1, 0, length // 2]))
    remember(x, ours, slots, lengths, 2)
    remember_reference(x, theirs, slots, lengths, 2)
    assert torch.equal(ours, theirs)


def test_pieces_of_a_stream_give_the_bits_of_the_whole(dtype: torch.dtype, device: str) -> None:
    x, weights = stream(1, 12, 32, dtype, device), some_taps(7, 16, 32, 1, dtype, device)
    slots, one = (torch.tensor([number], dtype=torch.int32, device=device) for number in (0, 1))
    past = torch.zeros(1, 6, 32, dtype=dtype, device=device)
    whole, _ = conv(x, weights, past, slots)
    pieces = []
    for piece in x.split([1, 4, 2, 5], dim=1):
        pieces.append(conv(piece.contiguous(), weights, past, slots)[0])
        remember(piece.contiguous(), past, slots, one * piece.shape[1], 1)
    assert torch.equal(torch.cat(pieces, dim=1), whole)


def test_a_filter_per_channel_is_normed_over_the_channels(dtype: torch.dtype, device: str, close: float) -> None:
    x, past = stream(2, 4, 20, dtype, device), stream(3, 6, 20, dtype, device)
    weight = torch.randn(7, 20, device=device).to(dtype)
    bias, scale, shift = (torch.randn(20, device=device) for _ in range(3))
    slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
    ours = depthwise_norm(x, weight, bias, scale, shift, 1e-6, past, slots)
    reference = depthwise_norm_reference(x, weight, bias, scale, shift, 1e-6, past, slots)
    torch.testing.assert_close(ours, reference, atol=close, rtol=close)
