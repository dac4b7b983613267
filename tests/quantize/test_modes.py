import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidRequest
from shoal.quantize import modes
from shoal.quantize.modes import (
    CODEC_MODES,
    MODES,
    WeightModes,
    int8_implementation,
    require_supported,
    supported_modes,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("none", WeightModes()),
        ("int8", WeightModes("int8", "int8")),
        ("fp8", WeightModes("fp8", "fp8")),
        ("slow=int8,fast=fp8,codec=int8", WeightModes("int8", "fp8", "int8")),
        ("int4, fast=int8", WeightModes("int4", "int8")),
        ("codec=int8", WeightModes(codec="int8")),
    ],
)
def test_a_bare_mode_applies_to_both_transformers(text: str, parsed: WeightModes) -> None:
    assert WeightModes.parse(text) == parsed


@given(st.builds(WeightModes, *[st.sampled_from(MODES)] * 2, st.sampled_from(CODEC_MODES)))
def test_modes_round_trip_through_text(chosen: WeightModes) -> None:
    assert WeightModes.parse(str(chosen)) == chosen


@pytest.mark.parametrize(
    "text", ["", "int3", "slow", "slow=", "tail=int8", "codec=fp8", "codec=int4", "int8,,", "=int8"]
)
def test_invalid_modes_are_refused_with_the_syntax(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"none, int8, int4, fp8.*slow=int8,fast=fp8"):
        WeightModes.parse(text)


@pytest.mark.parametrize("integers", [True, False])
def test_every_cpu_is_offered_int8_and_nothing_smaller(monkeypatch: pytest.MonkeyPatch, integers: bool) -> None:
    monkeypatch.setattr(modes, "has_int8_matmul", lambda: integers)
    require_supported(WeightModes.parse("int8,codec=int8"), CPU)
    with pytest.raises(InvalidRequest, match="fast=fp8 is not supported on cpu: fast can be none, int8 or w8a8"):
        require_supported(WeightModes.parse("slow=int8,fast=fp8"), CPU)


def test_int8_activations_are_for_the_transformers_on_a_cpu() -> None:
    require_supported(WeightModes.parse("w8a8,codec=int8"), CPU)
    assert "w8a8" not in supported_modes("slow", torch.device("mps"))
    assert "w8a8" not in supported_modes("codec", CPU)
    with pytest.raises(InvalidRequest, match="codec: none or int8"):
        WeightModes.parse("codec=w8a8")


@pytest.mark.parametrize(
    ("vnni", "capability", "implementation"),
    [
        (True, "AVX512", "int8 (VNNI, oneDNN)"),
        (True, "AVX2", "int8 (weight-only)"),
        (False, "AVX512", "int8 (weight-only)"),
        (False, "NO AVX", "int8 (weight-only)"),
        (False, "DEFAULT", "int8 (weight-only)"),  # arm64
    ],
)
def test_int8_is_multiplied_in_integers_only_where_torch_has_and_may_use_vnni(
    monkeypatch: pytest.MonkeyPatch, vnni: bool, capability: str, implementation: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert int8_implementation() == implementation


@pytest.mark.parametrize(("capability", "fp8"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_needs_a_gpu_with_fp8_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fp8: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert ("fp8" in supported_modes("slow", torch.device("cuda"))) == fp8


def test_modes_are_written_in_their_shortest_form() -> None:
    assert str(WeightModes("int8", "int8", "int8")) == "int8,codec=int8"
    assert str(WeightModes("int8", "fp8")) == "slow=int8,fast=fp8"
    assert str(WeightModes()) == "none"
