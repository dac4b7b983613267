import copy
from types import SimpleNamespace

import pytest
import torch

from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import SIZES
from shoal.codec.dac import Codec
from shoal.errors import InvalidRequest
from shoal.model.dual_ar import DualAR
from shoal.quantize import apply, frame_time, modes, policy
from shoal.quantize.apply import quantize_model
from shoal.quantize.modes import WeightModes
from shoal.quantize.policy import QuantizationChoice, check_requested, choose_modes
from shoal.tools.predicted_speed import fitted

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def choose(size: str, memory: float, requested: str = "auto", bandwidth: float | None = None) -> QuantizationChoice:
    model, codec = SIZES[size]
    with init_empty_weights():
        skeleton, sound = DualAR(model), Codec(codec)
    limit = int(memory * 1e9)
    return choose_modes(requested, skeleton, sound, device=GPU, dtype=torch.bfloat16, memory=limit, bandwidth=bandwidth)


@pytest.mark.parametrize(
    ("size", "memory", "taken"),
    [
        ("s1-mini", 24, "none"),
        ("s1-mini", 8, "none"),
        ("s1-mini", 5.4, "int8"),
        ("s1-mini", 4, "slow=int4,fast=int8,codec=int8"),
        ("s2-pro", 24, "none"),
        ("s2-pro", 16, "int8"),
        ("s2-pro", 12, "int8"),
        ("s2-pro", 10.5, "slow=int4,fast=int8"),
        ("s2-pro", 8, "slow=int4,fast=int8,codec=int8"),
    ],
)
def test_auto_chooses_the_largest_weights_that_fit(size: str, memory: float, taken: str) -> None:
    chosen = choose(size, memory)
    assert chosen.modes == WeightModes.parse(taken)
    assert f"{memory:.1f} GB of memory" in chosen.reason


@pytest.mark.parametrize(
    ("size", "bandwidth", "taken"),
    [
        ("s2-pro", 300e9, "int8"),
        ("s2-pro", 600e9, "none"),
        ("s2-pro", 220e9, "slow=int4,fast=int8"),
        ("s1-mini", 300e9, "none"),
    ],
)
def test_auto_takes_smaller_weights_where_larger_ones_are_slower_than_real_time(
    size: str, bandwidth: float, taken: str
) -> None:
    chosen = choose(size, 24, bandwidth=bandwidth)
    assert chosen.modes == WeightModes.parse(taken)
    assert (f"slower than real time at {bandwidth / 1e9:.0f} GB/s" in chosen.reason) == (taken != "none")


def test_auto_keeps_the_largest_weights_where_none_are_real_time() -> None:
    assert choose("s2-pro", 24, bandwidth=20e9).modes == WeightModes()


def test_the_prediction_agrees_with_the_frames_that_were_measured() -> None:
    assert pytest.approx(fitted(), rel=0.1) == (frame_time.LAYER_SECONDS, frame_time.BANDWIDTH_SHARE)


@pytest.mark.parametrize(
    ("capability", "clock", "bits", "expected"),
    [
        ((8, 9), 6_251_000, 192, 300e9),
        ((9, 0), 3_201_000, 6144, 4.9e12),
        ((7, 5), 5_001_000, 256, None),
        ((8, 9), 0, 0, None),
    ],
)
def test_the_bandwidth_of_a_card_is_that_of_its_data_sheet(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], clock: int, bits: int, expected: float | None
) -> None:
    properties = SimpleNamespace(memory_clock_rate=clock, memory_bus_width=bits)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = frame_time.memory_bandwidth.__wrapped__(GPU)
    assert found == (expected and pytest.approx(expected, rel=0.01))


def test_a_requested_mode_is_used() -> None:
    assert choose("s1-mini", 1000, "fp8").modes == WeightModes.parse("fp8")


def test_stored_quantized_weights_keep_their_mode_on_a_gpu(tiny: Checkpoint) -> None:
    model = copy.deepcopy(tiny.model)
    quantize_model(model, WeightModes("int4", "int8"))
    chosen = choose_modes("auto", model, tiny.codec, device=GPU, dtype=torch.bfloat16, memory=10**12)
    assert chosen == QuantizationChoice(WeightModes("int4", "int8"), "as stored")


@pytest.mark.parametrize(("stored", "integers", "chosen"), [
    ("none", True, "int8"),
    ("int8", True, "int8"),
    ("slow=int4,fast=int8", True, "fast=int8"),
    ("fp8", True, "none"),
    ("int8", False, "none"),
])  # fmt: skip
def test_auto_on_a_cpu_is_int8_or_floats(
    stored: str, integers: bool, chosen: str, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "has_int8_matmul", lambda: integers)
    monkeypatch.setattr(apply, "MIN_INT8_WEIGHTS", 1000)
    model = copy.deepcopy(tiny.model)
    quantize_model(model, WeightModes.parse(stored))
    found = choose_modes("auto", model, tiny.codec, device=CPU, dtype=torch.float32, memory=0)
    assert found.modes == WeightModes.parse(chosen)


def test_small_matrices_that_are_stored_as_int8_stay_so_with_the_native_backend(tiny: Checkpoint) -> None:
    model = copy.deepcopy(tiny.model)
    quantize_model(model, WeightModes("int4", "int8"))
    here = {"device": CPU, "dtype": torch.float32, "memory": 0, "native": True}
    found = choose_modes("auto", model, tiny.codec, **here)  # type: ignore[arg-type]
    assert found == QuantizationChoice(WeightModes("none", "int8"), "as stored, read by the native backend", True)
    assert choose_modes("int8", model, tiny.codec, **here).modes == WeightModes("int8", "int8")  # type: ignore[arg-type]


def test_auto_with_the_native_backend_is_int8_on_every_cpu(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "has_int8_matmul", lambda: False)
    monkeypatch.setattr(apply, "MIN_INT8_WEIGHTS", 1000)
    found = choose_modes("auto", tiny.model, tiny.codec, device=CPU, dtype=torch.float32, memory=0, native=True)
    assert found.modes == WeightModes.parse("int8")
    assert found.describe(CPU) == "int8 (the native backend reads int8 weights)"


@pytest.mark.parametrize(("integers", "how"), [(True, "int8 (VNNI, oneDNN)"), (False, "int8 (weight-only)")])
def test_on_a_cpu_the_log_says_what_computes_int8(integers: bool, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "has_int8_matmul", lambda: integers)
    chosen = QuantizationChoice(WeightModes(slow="int8"), "as requested")
    assert chosen.describe(CPU) == f"slow=int8 (as requested), computed as {how}"
    assert chosen.describe(GPU) == "slow=int8 (as requested)"
    assert QuantizationChoice(WeightModes(), "as requested").describe(CPU) == "none (as requested)"


def test_a_requested_mode_is_checked_before_anything_is_read() -> None:
    check_requested("auto", CPU)
    check_requested("fp8", GPU)
    with pytest.raises(InvalidRequest, match="is not supported on cpu"):
        check_requested("fp8", CPU)
    with pytest.raises(InvalidRequest, match="cannot quantize to 'tiny'"):
        check_requested("tiny", GPU)


def test_a_model_of_small_matrices_stays_floats_on_a_cpu(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "has_int8_matmul", lambda: True)
    here = {"device": CPU, "dtype": torch.float32, "memory": 0}
    assert choose_modes("auto", tiny.model, tiny.codec, **here).modes == WeightModes()  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="too small for int8 on a CPU"):
        choose_modes("int8", tiny.model, tiny.codec, **here)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="leave codec=int8 out"):
        choose_modes("codec=int8", tiny.model, tiny.codec, **here)  # type: ignore[arg-type]


def test_int8_activations_need_the_native_backend(tiny: Checkpoint) -> None:
    settings = {"device": CPU, "dtype": torch.float32, "memory": 10**12}
    chosen = choose_modes("w8a8", tiny.model, tiny.codec, native=True, **settings)  # type: ignore[arg-type]
    assert chosen.describe(CPU) == "w8a8 (as requested)"
    with pytest.raises(InvalidRequest, match=r"w8a8 needs the native backend .* or use int8"):
        choose_modes("w8a8", tiny.model, tiny.codec, native=False, **settings)  # type: ignore[arg-type]
