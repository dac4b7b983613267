"""Which layers of a model run in CUDA C++ for few rows, and that frames have the same bits with and without them."""

import logging
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import random_checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.execution import few_rows
from shoal.engine.execution.few_rows import FewRowsLayers, few_rows_layers
from shoal.engine.execution.fused import ResidualStream
from shoal.engine.utterance import Turn, Utterance
from shoal.kernels.rms_norm import RMSNorm
from shoal.kernels.sm90.few_rows import LinearWeights
from shoal.kernels.sm90.launch import KernelError
from shoal.model.dual_ar import DualAR
from shoal.quantize.apply import quantize_model
from shoal.quantize.modes import WeightModes
from shoal.speech import SamplingParams


def fake_weights() -> Mock:
    weights = Mock(spec=LinearWeights)
    weights.supports_rows = lambda rows: rows <= 2
    return weights


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(few_rows, "is_hopper", lambda device: True)
    monkeypatch.setattr(few_rows, "kernels_unavailable", lambda device: None)
    return monkeypatch


@pytest.fixture
def one_wide_layer(on_hopper: pytest.MonkeyPatch, tiny: Checkpoint) -> DualAR:
    """A model with a layer for which there are kernels."""
    layer = tiny.model.slow.layers[0].attention.wqkv
    on_hopper.setattr(few_rows, "_wide_layers", lambda model: {layer: [object()]})
    return tiny.model


def test_other_gpus_and_narrow_layers_use_triton_without_a_warning(
    tiny: Checkpoint, on_hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(few_rows_layers(tiny.model)) == 0
        on_hopper.setattr(few_rows, "is_hopper", lambda device: False)
        assert len(few_rows_layers(tiny.model)) == 0
    assert not caplog.records


def test_missing_cuda_bindings_are_named(
    one_wide_layer: DualAR, on_hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_hopper.setattr(few_rows, "kernels_unavailable", lambda device: "cuda-bindings is not installed")
    assert len(few_rows_layers(one_wide_layer)) == 0
    assert "cuda-bindings is not installed" in caplog.text


def test_a_kernel_that_does_not_load_leaves_those_of_triton(
    one_wide_layer: DualAR, on_hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_hopper.setattr(few_rows, "load_kernels", Mock(side_effect=KernelError("loading few_rows_linear failed")))
    assert len(few_rows_layers(one_wide_layer)) == 0
    assert "loading few_rows_linear failed" in caplog.text


@pytest.mark.parametrize(("unequal", "layers"), [(0, 1), (3, 0)])
def test_kernels_are_used_only_if_they_have_the_bits_of_triton(
    unequal: int,
    layers: int,
    one_wide_layer: DualAR,
    on_hopper: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = fake_weights()
    weights.kernels, weights.weight = {}, torch.zeros(8, 4)
    on_hopper.setattr(few_rows, "_pack", lambda layers, device: dict.fromkeys(layers, weights))
    on_hopper.setattr(few_rows, "BitComparison", lambda weights: Mock(weights=weights, unequal=unequal))
    assert len(few_rows_layers(one_wide_layer)) == layers
    assert ("3 values differ from Triton's in a layer of [8, 4]" in caplog.text) == (unequal > 0)


def test_a_stream_uses_them_for_the_rows_they_take() -> None:
    layer, norm, weights = nn.Linear(8, 8, bias=False), RMSNorm(8, 1e-6), fake_weights()
    stream = ResidualStream(torch.zeros(2, 8), FewRowsLayers({layer: weights}))
    assert stream.project(norm, layer) is weights.project.return_value
    weights.project.assert_called_once_with(stream.x, norm.weight, norm.eps)
    inner = torch.ones(2, 8)
    stream.add(inner, layer)
    weights.add.assert_called_once_with(stream.x, inner)
    assert FewRowsLayers({layer: weights}).find(layer, 3) is None


def spoken(core: EngineCore, numbers: list[int], frames: int) -> dict[int, np.ndarray]:
    """Run these requests at once; return their codes. A request depends on its number only."""
    requests = []
    for number in numbers:
        prompt = np.zeros((20 + number, 1 + core.checkpoint.model.config.num_codebooks), np.int32)
        prompt[:, 0] = np.arange(len(prompt)) * (number + 1) % 150
        requests.append(Utterance(number, [Turn("hm", prompt, prompt)], SamplingParams(seed=number, max_frames=frames)))
        core.add(requests[-1])
    while not core.idle:
        for event in core.step():
            assert event.error is None, event.error
    return {each.id: each.all_codes() for each in requests}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "w8a8"])
def test_s2_pro_generates_the_same_frames_alone_in_pairs_and_in_a_batch(mode: str) -> None:
    checkpoint = random_checkpoint("s2-pro", device="cuda", encoder=False)
    quantize_model(checkpoint.model, WeightModes.parse(mode))
    assert len(few_rows_layers(checkpoint.model)) == 4 * (36 + 4) + 1
    core = EngineCore(checkpoint, EngineConfig(slots=16, guard=False, backend="graph", kv_bytes=1 << 30))
    batch = spoken(core, list(range(10)), 40)
    for numbers in ([0], [7], [2, 5], [1, 3, 4, 6], list(range(1, 9))):
        for number, codes in spoken(core, numbers, 40).items():
            assert np.array_equal(codes, batch[number]), number
