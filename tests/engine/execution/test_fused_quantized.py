"""Quantized weights and KV cache through the fused kernels give what the eager path samples."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.engine.execution import fused
from shoal.engine.execution.fused import FusedFrame, ResidualStream, project
from shoal.engine.execution.slot_state import SlotStates
from shoal.engine.kv_cache import AttentionMetadata, PagedKV
from shoal.engine.scheduling.sequence import Sequence
from shoal.kernels.rms_norm import RMSNorm
from shoal.model.dual_ar import DualAR
from shoal.model.frame import FrameSampler
from shoal.model.linear import QUANTIZED_LINEARS, QuantizedMode
from shoal.model.slow import Head
from shoal.quantize.apply import quantize_model
from shoal.quantize.modes import WeightModes
from shoal.speech import SamplingParams

pytest.importorskip("triton")

LENGTH = 20  # tokens including the newest, which is in the second of two blocks


def prepare(model: DualAR) -> tuple[PagedKV, SlotStates]:
    """Return a random KV cache and a sequence in it."""
    generator = torch.Generator().manual_seed(0)
    kv = PagedKV(model.config.slow, blocks=2, size=16, dtype=torch.int8, device="cpu")
    for part in kv.parts():
        part.copy_(torch.randint(1, 9, part.shape, generator=generator) / (1 if part.dtype == torch.int8 else 100))
    states = SlotStates(model, 1)
    sequence = Sequence.start(0, np.zeros((3, 1 + model.config.num_codebooks), np.int32), SamplingParams(seed=3), 100)
    sequence.slot = 0
    states.bind([sequence])
    states.last_tokens[:, 0] = model.config.semantic_begin_id
    return kv, states


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under the interpreter, on the CPU")
@torch.inference_mode()
@pytest.mark.parametrize("modes", [WeightModes(slow="int8", fast="fp8"), WeightModes.parse("w8a8")], ids=str)
def test_the_fused_frame_samples_what_the_eager_path_samples(tiny: Checkpoint, modes: WeightModes) -> None:
    model, table = copy.deepcopy(tiny.model), torch.tensor([[0, 1]])
    quantize_model(model, modes)
    head = Head(model.slow)

    kv, states = prepare(model)
    kv.begin_pass(AttentionMetadata(torch.tensor([LENGTH - 1]), [], table, torch.tensor([LENGTH])))
    hidden = model.slow(states.last_tokens[:1], torch.tensor([LENGTH - 1]), kv)
    plain = FrameSampler(model, head).sample(hidden, states.rows(torch.tensor([0]), penalised=True))

    ours, states = prepare(model)
    frame = FusedFrame(model, head, ours, states, torch.cat((table, table)).int(), 1)
    frame.positions.fill_(LENGTH - 1)
    frame.run()
    assert torch.equal(frame.tokens, plain)
    assert torch.equal(ours.keys, kv.keys)
    assert torch.equal(ours.value_scales, kv.value_scales)


KERNELS = ("linear", "split_k_linear", "int4_linear", "int4_split_k_linear", "int8_rows", "int8_rms_norm")
PER_CHANNEL = [["linear"], ["linear"], ["split_k_linear"]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("int8", PER_CHANNEL),
        ("fp8", PER_CHANNEL),
        ("w8a8", [["int8_rows", "linear"], ["int8_rms_norm", "linear"], ["int8_rows", "split_k_linear"]]),
        ("int4", [["int4_linear"], ["int4_linear"], ["int4_split_k_linear"]]),
    ],
)
def test_each_mode_runs_its_own_kernels(
    monkeypatch: pytest.MonkeyPatch, mode: QuantizedMode, expected: list[list[str]]
) -> None:
    """The kernels of `project`, of a norm with a projection, and of a residual add."""
    launched: list[str] = []
    monkeypatch.setattr(fused, "fused_rms_norm", lambda x, *_, **__: x)
    for kernel in KERNELS:
        monkeypatch.setattr(fused, kernel, lambda x, *_, kernel=kernel, **__: launched.append(kernel) or x)
    layer = QUANTIZED_LINEARS[mode].from_linear(torch.nn.Linear(128, 128, bias=False))
    x, norm = torch.zeros(2, 128), RMSNorm(128, 1e-6)

    def kernels_of(launch: Callable[[], object]) -> list[str]:
        launched.clear()
        launch()
        return launched.copy()

    calls = (
        lambda: project(x, layer),
        lambda: ResidualStream(x).project(norm, layer),
        lambda: ResidualStream(x).add(x, layer),
    )
    assert [kernels_of(call) for call in calls] == expected
