import pytest
import torch

from shoal.kernels.codec_decoder.conv import Taps, conv
from shoal.kernels.codec_decoder.residual_unit import residual_unit, residual_unit_reference, should_fuse
from shoal.kernels.tile import Tile
from tests.kernels.codec_decoder.packs import pack


@pytest.fixture(params=[(48, 3), (32, 1)], ids=["unequal blocks", "equal blocks"])
def case(request: pytest.FixtureRequest, dtype: torch.dtype, device: str) -> tuple[object, ...]:
    """Streams of three, one and two frames, four rows each, with left context."""
    channels, dilation = request.param
    packing = pack([(4, 3), (0, 1), (5, 2)], device)
    x, activated = (torch.randn(4 * 8, channels, device=device).to(dtype) for _ in range(2))
    inner, outer = (
        Taps(
            (torch.randn(taps, channels, channels, device=device) / (taps * channels) ** 0.5).to(dtype),
            bias,
            tap_dilation,
        )
        for taps, bias, tap_dilation in zip((7, 1), torch.randn(2, channels, device=device), (dilation, 1), strict=True)
    )
    alphas = torch.rand(2, channels, device=device) + 0.5
    past = torch.randn(7, inner.steps, channels, device=device).to(dtype)
    return x, activated, inner, alphas[0], outer, alphas[1], past, packing


@pytest.mark.parametrize("rows", [16, 64])
def test_the_fused_unit_equals_the_reference(case: tuple[object, ...], rows: int, close: float) -> None:
    ours = residual_unit(*case, tile=Tile(rows, 0, 16))  # type: ignore[arg-type]
    expected = residual_unit_reference(*case)  # type: ignore[arg-type]
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, want, atol=close, rtol=close)


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "rate"), [(96, 2048), (192, 1024)])
@pytest.mark.parametrize("frames", [16, 64])
def test_the_fused_unit_gives_the_bits_of_two_launches_at_the_released_sizes(
    channels: int, rate: int, frames: int
) -> None:
    torch.manual_seed(0)
    x, activated = (torch.randn(frames * rate, channels, device="cuda").half() for _ in range(2))
    assert should_fuse(*x.shape)
    packing = pack([(0, frames - 3), (4, 3)], "cuda", frames=frames)
    inner = Taps((torch.randn(7, channels, channels, device="cuda") / 26).half(), torch.randn(channels).cuda(), 9)
    outer = Taps((torch.randn(1, channels, channels, device="cuda") / 10).half(), torch.randn(channels).cuda())
    alphas = torch.rand(2, channels, device="cuda") + 0.5
    past = torch.randn(7, inner.steps, channels, device="cuda").half()
    ours = residual_unit(x, activated, inner, alphas[0], outer, alphas[1], past, packing)
    hidden = conv(activated, inner, past, packing, alpha=alphas[0], plain=False)[1]
    theirs = conv(hidden, outer, None, packing, residual=x, alpha=alphas[1])
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("rows", "channels"), [(8192, 96), (1 << 16, 192), (1 << 16, 80)])
def test_channels_of_two_blocks_are_fused_if_there_are_enough_rows(rows: int, channels: int) -> None:
    assert should_fuse(rows, channels)
    assert not should_fuse(rows // 16, channels)


@pytest.mark.parametrize("channels", [384, 112, 8])
def test_other_channels_are_not_fused(channels: int) -> None:
    assert not should_fuse(1 << 20, channels)
