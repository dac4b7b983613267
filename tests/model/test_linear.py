import pytest
import torch
from torch import nn

from shoal.model.linear import AnyLinear, Int4Linear, Int8Linear, dense, first_rows, take_rows, to_column_major


def plain() -> nn.Linear:
    return nn.Linear(16, 12, bias=False)


def int8() -> Int8Linear:
    layer = Int8Linear(16, 12)
    layer.weight.copy_(torch.randint(-128, 128, layer.weight.shape))
    layer.scales.copy_(torch.rand(12) / 100)
    return layer


def int4() -> Int4Linear:
    layer = Int4Linear(16, 12, group_size=8)
    layer.weight.copy_(torch.randint(0, 256, layer.weight.shape))
    layer.scales_and_zeros.copy_(torch.randn(layer.scales_and_zeros.shape) / 10)
    return layer


@pytest.fixture(params=[plain, int8, int4], ids=["plain", "int8", "int4"])
def layer(request: pytest.FixtureRequest) -> AnyLinear:
    made: AnyLinear = request.param()
    return made.requires_grad_(False)


def test_the_first_outputs_are_those_of_the_whole_layer(layer: AnyLinear) -> None:
    x = torch.randn(5, 16)
    torch.testing.assert_close(first_rows(layer, x, 7), layer(x)[:, :7])


def test_a_layer_of_chosen_rows_gives_those_outputs_in_that_order(layer: AnyLinear) -> None:
    x, rows = torch.randn(5, 16), torch.tensor([11, 0, 3, 3])
    taken = take_rows(layer, rows)
    assert type(taken) is type(layer)
    torch.testing.assert_close(taken(x), layer(x)[:, rows])


def test_int8_is_a_product_of_integers_scaled_row_by_row() -> None:
    layer, x = int8(), torch.randn(3, 16)
    weight = layer.weight.float() * layer.scales.float()[:, None]
    torch.testing.assert_close(layer(x), x @ weight.T)


def test_int4_is_affine_in_groups_of_columns() -> None:
    layer = int4()
    weight = layer.dequantize(torch.float32)
    for row, column in ((0, 0), (3, 7), (3, 8), (11, 15)):
        byte = int(layer.weight[row, column // 2])
        q = byte >> 4 if column % 2 else byte & 15
        scale, zero = layer.scales_and_zeros[column // 8, row].float().tolist()
        assert float(weight[row, column]) == pytest.approx((q - 8) * scale + zero, abs=1e-6)


def test_a_last_group_may_be_shorter_than_the_others() -> None:
    layer = Int4Linear(20, 8, group_size=16)
    layer.weight.zero_()
    layer.scales_and_zeros.fill_(1.0)
    assert layer.dequantize(torch.float32).shape == (8, 20)


def test_a_dense_layer_shares_the_weight_it_is_given() -> None:
    weight = torch.randn(3, 4)
    assert dense(weight).weight.data_ptr() == weight.data_ptr()


@torch.inference_mode()
def test_column_major_matrices_compute_the_same() -> None:
    layers = nn.Sequential(nn.Linear(8, 24, bias=False), nn.Linear(24, 8))
    x = torch.randn(3, 8)
    before = layers(x)
    to_column_major(layers)
    assert [layer.weight.is_contiguous() for layer in layers] == [False, True]
    torch.testing.assert_close(layers(x), before, rtol=0, atol=1e-6)
