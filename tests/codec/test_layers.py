import pytest
import torch
from torch import nn

from shoal.codec.config import WindowTransformerConfig
from shoal.codec.layers import CausalConv, CausalUpsample, Snake, WindowTransformer, window_mask
from shoal.codec.streaming import NoPast

SMALL = WindowTransformerConfig(n_layer=1, n_head=2, dim=16, intermediate_size=24, head_dim=8, window_size=4)


def test_snake_adds_a_squared_sine_and_keeps_zero() -> None:
    snake, x = Snake(3), torch.randn(1, 3, 5)
    with torch.no_grad():
        snake.alpha.copy_(torch.tensor([0.5, 1.0, 2.0]).view(1, 3, 1))
        expected = x + torch.sin(snake.alpha * x) ** 2 / snake.alpha
        torch.testing.assert_close(snake(x), expected)
        assert not snake(torch.zeros(1, 3, 2)).any()


@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(7, 1, 1), (7, 1, 9), (8, 4, 1), (2, 2, 1), (1, 1, 1)])
def test_a_convolution_is_causal_and_keeps_the_rate(kernel: int, stride: int, dilation: int) -> None:
    conv = CausalConv(2, 3, kernel, stride=stride, dilation=dilation)
    x = torch.randn(1, 2, 12 * stride)
    y = conv(x, NoPast())
    assert y.shape == (1, 3, 12)
    changed = x.clone()
    changed[..., 6 * stride :] += 1
    torch.testing.assert_close(conv(changed, NoPast())[..., :6], y[..., :6])


@pytest.mark.parametrize(("kernel", "stride"), [(16, 8), (4, 2), (2, 2)])
def test_a_transposed_convolution_equals_torch_without_the_last_outputs(kernel: int, stride: int) -> None:
    up, x = CausalUpsample(2, 3, kernel, stride), torch.randn(1, 2, 5)
    plain = nn.functional.conv_transpose1d(x, up.conv.weight, up.conv.bias, stride=stride)
    torch.testing.assert_close(up(x, NoPast()), plain[..., : 5 * stride])


def test_a_query_sees_its_window_and_nothing_from_before_the_stream() -> None:
    mask = window_mask(torch.tensor([0, 2, 9]), steps=3, window=4)
    assert mask.shape == (3, 1, 3, 6)
    assert mask.sum(-1)[:, 0].tolist() == [[1, 2, 3], [3, 4, 4], [4, 4, 4]]
    for query in range(3):
        assert bool(mask[0, 0, query, 3 + query])
        assert not mask[0, 0, query, 4 + query :].any()


@torch.inference_mode()
def test_a_step_reaches_window_minus_one_steps_per_layer() -> None:
    transformer = WindowTransformer(SMALL).eval()
    transformer.reserve(12)
    x = torch.randn(1, 16, 12)
    changed = x.clone()
    changed[..., 2] += 1
    difference = (transformer(x, NoPast()) - transformer(changed, NoPast())).abs().amax(1)[0]
    assert difference[:2].max() == 0
    assert bool((difference[2:6] > 0).all())
    torch.testing.assert_close(difference[6:], torch.zeros(6), rtol=0, atol=1e-6)


def test_a_reserved_table_is_long_enough_and_built_once() -> None:
    transformer = WindowTransformer(SMALL, steps_per_frame=4)
    transformer.reserve(2000)
    table = transformer.table
    assert len(table) == 8192
    transformer.reserve(2048)
    assert transformer.table is table
    transformer.reserve(2049)
    assert len(transformer.table) == 12288
