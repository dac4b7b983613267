"""Predicted speed of GPUs that were not measured."""

import pytest

from shoal.quantize.modes import WeightModes
from shoal.tools.predicted_speed import CARDS, H200, MEASURED, frame_seconds, predict

T4 = next(card for card in CARDS if card.name == "T4")
INT8 = WeightModes("int8", "int8")


@pytest.mark.parametrize("model", MEASURED)
def test_the_prediction_for_the_measured_card_is_the_measurement(model: str) -> None:
    assert frame_seconds(H200, model, WeightModes()) == pytest.approx(MEASURED[model].frame)


@pytest.mark.parametrize("model", MEASURED)
def test_quantized_weights_are_faster_only_with_fused_kernels(model: str) -> None:
    """Plain operators dequantize the weights of a layer into memory before each product."""
    assert frame_seconds(H200, model, INT8) < frame_seconds(H200, model, WeightModes())
    assert frame_seconds(T4, model, INT8) > frame_seconds(T4, model, WeightModes())


def test_a_large_model_on_plain_operators_is_not_predicted_to_be_real_time() -> None:
    assert predict(T4, "s1-mini").rtf < 0.5
    assert predict(T4, "s2-pro").rtf > 1
