import pytest
import torch

from shoal.kernels.codec_decoder.conv import Taps, update_past
from shoal.kernels.codec_decoder.output_conv import output_conv, output_conv_reference
from tests.kernels.codec_decoder.packs import pack


def some_taps(channels: int, dtype: torch.dtype, device: str) -> Taps:
    weight = torch.randn(7, 1, channels, device=device) / (7 * channels) ** 0.5
    return Taps(weight.to(dtype), torch.randn(1, device=device))


@pytest.mark.parametrize(("channels", "rate"), [(24, 5), (96, 5), (24, 123), (24, 250)])
def test_samples_continue_the_streams_of_their_slots(
    channels: int, rate: int, dtype: torch.dtype, device: str, close: float
) -> None:
    """A program computes 122 samples of a frame."""
    taps, packing = some_taps(channels, dtype, device), pack([(4, 3), (0, 1), (5, 2)], device)
    x, past = (torch.randn(*shape, channels, device=device).to(dtype) for shape in ((8 * rate,), (7, 6)))
    samples = torch.full((8 * rate,), torch.nan, device=device)
    output_conv(x, taps, past, packing, samples)
    torch.testing.assert_close(samples, output_conv_reference(x, taps, past, packing), atol=close, rtol=close)


def test_chunks_of_a_stream_are_bit_identical_to_the_whole(dtype: torch.dtype, device: str) -> None:
    taps, x = some_taps(96, dtype, device), torch.randn(12 * 32, 96, device=device).to(dtype)
    past, whole, chunks = torch.zeros(7, 6, 96, dtype=dtype, device=device), torch.empty(len(x), device=device), []
    output_conv(x, taps, past, pack([(0, 12)], device, frames=12), whole)
    for chunk in x.split([1 * 32, 4 * 32, 2 * 32, 5 * 32]):
        packing = pack([(0, len(chunk) // 32)], device, frames=len(chunk) // 32)
        chunks.append(torch.empty(len(chunk), device=device))
        output_conv(chunk.contiguous(), taps, past, packing, chunks[-1])
        update_past(chunk.contiguous(), past, packing)
    assert torch.equal(torch.cat(chunks), whole)
