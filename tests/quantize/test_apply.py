import copy
import weakref

import pytest
import torch
from torch import nn

from shoal.checkpoint.load import Checkpoint
from shoal.codec.dac import Codec
from shoal.errors import InvalidRequest
from shoal.model import linear
from shoal.model.dual_ar import DualAR
from shoal.model.linear import DynamicInt8Linear, Fp8Linear, Int4Linear, Int8Linear, WeightOnlyInt8Linear
from shoal.model.slow import Head
from shoal.quantize import apply
from shoal.quantize.apply import (
    convert_int8_for_cpu,
    modes_of,
    prepare_codec,
    prepare_model,
    quantize_codec,
    quantize_model,
)
from shoal.quantize.convolution import Int8Conv
from shoal.quantize.modes import Mode, WeightModes, has_int8_matmul
from shoal.quantize.sizes import codec_bytes, model_bytes

needs_integers = pytest.mark.skipif(not has_int8_matmul(), reason="this CPU multiplies no integers")


@pytest.fixture
def model(tiny: Checkpoint) -> DualAR:
    return copy.deepcopy(tiny.model)


@pytest.fixture
def codec(tiny: Checkpoint) -> Codec:
    return copy.deepcopy(tiny.codec)


@pytest.mark.parametrize(
    ("mode", "layer_type", "error"), [("int8", Int8Linear, 0.01), ("fp8", Fp8Linear, 0.04), ("int4", Int4Linear, 0.15)]
)
def test_every_matrix_is_quantized_within_the_error_of_its_mode(
    mode: Mode, layer_type: type[nn.Module], error: float, model: DualAR, tiny: Checkpoint
) -> None:
    quantize_model(model, WeightModes(mode, mode))
    for name, plain in tiny.model.named_modules():
        if isinstance(plain, nn.Linear):
            layer = model.get_submodule(name)
            assert isinstance(layer, layer_type)
            away = layer.dequantize(torch.float32) - plain.weight  # type: ignore[operator]
            assert away.norm() / plain.weight.norm() < error


def test_components_are_quantized_separately(model: DualAR) -> None:
    quantize_model(model, WeightModes(slow="int8", fast="fp8"))
    assert modes_of(model) == WeightModes("int8", "fp8")
    assert isinstance(model.fast.output, Fp8Linear)
    assert isinstance(model.slow.embeddings, nn.Embedding)


def test_mode_none_dequantizes(model: DualAR) -> None:
    quantize_model(model, WeightModes.parse("int8"))
    expected = model.fast.output.dequantize(torch.float32)  # type: ignore[operator]
    quantize_model(model, WeightModes())
    assert modes_of(model) == WeightModes()
    assert torch.equal(model.fast.output.weight, expected)


def test_quantized_weights_are_not_requantized_to_another_mode(model: DualAR) -> None:
    quantize_model(model, WeightModes.parse("int4"))
    with pytest.raises(InvalidRequest, match=r"slow is stored as int4.*use the original weights"):
        quantize_model(model, WeightModes.parse("int8"))


def test_a_matrix_is_freed_before_the_next_one_but_one_is_quantized(model: DualAR) -> None:
    """Otherwise a card that holds the quantized model could not load it."""
    originals = [weakref.ref(each.weight) for each in model.modules() if isinstance(each, nn.Linear)]
    alive = []
    quantize_model(
        model, WeightModes.parse("int8"), on_layer=lambda _: alive.append(sum(ref() is not None for ref in originals))
    )
    expected = [len(originals) - done for done in range(len(alive))]
    assert all(found <= most for found, most in zip(alive, expected, strict=True)), alive


def test_the_dtype_of_float_weights_is_set_separately(model: DualAR) -> None:
    table = model.slow.rope_table.dtype
    quantize_model(model, WeightModes.parse("fp8"), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.slow.embeddings.weight.dtype == torch.bfloat16
    assert model.fast.output.weight.dtype == torch.float8_e4m3fn
    assert model.slow.rope_table.dtype == table


def test_a_bias_does_not_change_the_output_dtype() -> None:
    plain = nn.Linear(16, 8)
    layer, x = Int8Linear.from_weight(plain.weight, plain.bias.detach()), torch.randn(3, 16)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(layer(x), plain(x), atol=0.05, rtol=0.05)


# On a CPU


@needs_integers
def test_dynamic_int8_is_close_to_floats_and_independent_of_the_batch() -> None:
    weight, x = torch.randn(300, 200), torch.randn(7, 200) * torch.logspace(-3, 3, 7)[:, None]
    stored = Int8Linear.from_weight(weight)
    layer, expected = DynamicInt8Linear(stored.weight, stored.scales), stored(x)
    y = layer(x)
    assert ((y - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.02
    assert torch.equal(torch.cat([layer(row[None]) for row in x]), y)
    assert torch.equal(layer(x, 11), y[:, :11])
    assert torch.equal(layer(x.view(7, 1, 200)), y.view(7, 1, 300))
    assert torch.equal(layer(torch.zeros(1, 200)), torch.zeros(1, 300))
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("tile", [200, 1000, 1 << 19])
def test_weight_only_int8_computes_what_the_stored_layer_does_a_tile_at_a_time(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "TILE", tile)
    plain, x = nn.Linear(200, 300), torch.randn(7, 200)
    stored = Int8Linear.from_weight(plain.weight, plain.bias.detach())
    layer, expected = WeightOnlyInt8Linear(stored.weight, stored.scales, stored.bias), stored(x)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x, 11), expected[:, :11])
    torch.testing.assert_close(layer(x.view(7, 1, 200)), expected.view(7, 1, 300))
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_without_vnni_large_matrices_stay_int8_and_take_half_the_memory_or_less(
    model: DualAR, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "has_int8_matmul", lambda: False)
    monkeypatch.setattr(apply, "MIN_INT8_WEIGHTS", 48 * 128)
    prepare_model(model, WeightModes.parse("int8"), dtype=torch.float32)
    first, plain = model.slow.layers[0], tiny.model.slow.layers[0]
    layer, before = first.feed_forward.w13, plain.feed_forward.w13  # type: ignore[union-attr]
    assert isinstance(layer, WeightOnlyInt8Linear)
    assert sum(buffer.nbytes for buffer in layer.buffers()) < 0.5 * before.weight.nbytes  # type: ignore[union-attr]
    assert torch.equal(first.attention.wo.weight, plain.attention.wo.weight)  # type: ignore[union-attr]
    assert modes_of(model) == WeightModes.parse("int8")


@needs_integers
def test_on_a_cpu_large_matrices_become_dynamic_int8_and_small_ones_stay_floats(
    model: DualAR, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "MIN_INT8_WEIGHTS", 48 * 128)
    prepare_model(model, WeightModes.parse("int8"), dtype=torch.float32)
    first, plain = model.slow.layers[0], tiny.model.slow.layers[0]
    assert isinstance(first.feed_forward.w13, DynamicInt8Linear)  # type: ignore[union-attr]
    assert torch.equal(first.attention.wo.weight, plain.attention.wo.weight)  # type: ignore[union-attr]


def test_on_a_cpu_no_stored_int8_layer_is_left(model: DualAR, codec: Codec) -> None:
    quantize_model(model, WeightModes.parse("int8"))
    quantize_codec(codec, "int8")
    convert_int8_for_cpu(model)
    convert_int8_for_cpu(codec)
    slow = (Int8Linear, Int8Conv)
    assert not any(isinstance(module, slow) for module in (*model.modules(), *codec.modules()))


def test_prepare_model_prunes_the_output_rows_that_are_never_sampled(model: DualAR, tiny: Checkpoint) -> None:
    expected = Head(tiny.model.slow)
    prepare_model(model, WeightModes())
    assert len(model.slow.output.weight) == len(expected.ids)
    x = torch.randn(3, 48)
    assert torch.equal(Head(model.slow)(x), expected(x))
    with pytest.raises(AssertionError, match="pruned"):
        Head(model.slow, full_vocab=True)


# The codec


def test_an_int8_codec_decodes_closely_and_encodes_exactly_the_same(codec: Codec, tiny: Checkpoint) -> None:
    codes = torch.randint(0, 100, (2, 10, 20))
    samples = tiny.codec.decode(codes)
    quantize_codec(codec, "int8")
    assert any(isinstance(module, Int8Conv) and module.transposed for module in codec.modules())
    away = codec.decode(codes) - samples
    assert 0 < away.norm() / samples.norm() < 0.05
    assert torch.equal(codec.encode(samples), tiny.codec.encode(samples))


def test_a_dequantized_convolution_computes_the_same() -> None:
    for plain in (nn.Conv1d(6, 4, 3, stride=2, dilation=2), nn.ConvTranspose1d(6, 4, 6, stride=3, bias=False)):
        layer, x = Int8Conv.from_conv(plain), torch.randn(2, 6, 20)
        torch.testing.assert_close(layer.dequantize()(x), layer(x))
        assert (layer(x) - plain(x)).norm() / plain(x).norm() < 0.02


# Sizes


@pytest.mark.parametrize("mode", ["none", "int8", "fp8", "int4"])
@pytest.mark.parametrize("family", ["s1", "s2"])
def test_predicted_model_bytes_equal_those_after_quantization(
    mode: Mode, family: str, tiny: Checkpoint, tiny_s2: Checkpoint
) -> None:
    model = copy.deepcopy((tiny if family == "s1" else tiny_s2).model)
    predicted = model_bytes(model, WeightModes(mode, mode), torch.bfloat16)
    model.slow.prune_output()
    quantize_model(model, WeightModes(mode, mode), dtype=torch.bfloat16)
    head = Head(model.slow).output.weight.nbytes if family == "s2" else 0
    assert predicted == sum(tensor.nbytes for tensor in model.state_dict().values()) + head
    assert predicted == model_bytes(model, WeightModes(mode, mode), torch.bfloat16)


@pytest.mark.parametrize("mode", ["none", "int8"])
def test_predicted_codec_bytes_equal_those_after_quantization(mode: Mode, codec: Codec) -> None:
    predicted = codec_bytes(codec, mode)
    quantize_codec(codec, mode)
    assert predicted == sum(tensor.nbytes for tensor in codec.state_dict().values())
    prepare_codec(codec, "none")
