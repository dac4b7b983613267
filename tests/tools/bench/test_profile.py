import json
from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from shoal.codec.streaming import StreamingDecoder
from shoal.engine.audio_decoder import AudioDecoder
from shoal.errors import InvalidRequest
from shoal.native.codec import NativeDecoder
from shoal.quantize import apply
from shoal.quantize.modes import has_int8_matmul
from shoal.tools.bench import profile
from shoal.tools.bench.profile import ProfiledPart, RequestProfile

needs_vnni = pytest.mark.skipif(not has_int8_matmul(), reason="this CPU has no VNNI")


def test_every_part_of_a_request_is_timed_and_the_largest_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SECONDS", 0.0)
    monkeypatch.setattr(profile, "FRAMES", 4)
    result = json.loads(profile.run_profile("random:tiny", device="cpu", voices=2).as_json())
    assert [part["name"] for part in result["parts"]] == [
        "tokenize", "prefill", "slow step", "fast steps", "sampling", "codec", "encode", "host gaps"
    ]  # fmt: skip
    assert set(result["steps"]) == {"1", "2"}
    assert result["ceiling"] > 0
    assert len(result["bottlenecks"]) == 3


def test_only_the_codec_is_timed_not_the_clearing_of_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, resets, time = 0, list[int](), profile._time

    def noting(reset: Callable[[Any, Sequence[int]], None], decoder: Any, slots: Sequence[int]) -> None:
        resets.append(timed)
        reset(decoder, slots)

    def timing(work: profile.TimedCall, device: str) -> float:
        nonlocal timed
        timed += 1
        try:
            return time(work, device)
        finally:
            timed -= 1

    monkeypatch.setattr(profile, "SECONDS", 0.0)
    monkeypatch.setattr(profile, "FRAMES", 4)
    monkeypatch.setattr(profile, "_time", timing)
    for kind in (StreamingDecoder, NativeDecoder):
        monkeypatch.setattr(kind, "reset", lambda *given, reset=kind.reset: noting(reset, *given))
    profile.run_profile("random:tiny", device="cpu", voices=2)
    assert resets
    assert not any(resets)


def test_host_gaps_are_omitted_when_codec_and_model_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SECONDS", 0.0)
    monkeypatch.setattr(profile, "FRAMES", 4)
    # Pretend that the codec overlaps with the model, as on a GPU.
    monkeypatch.setattr(AudioDecoder, "overlap", property(lambda box: True, lambda box, asked: None), raising=False)
    result = profile.run_profile("random:tiny", device="cpu", voices=1)
    assert result.beside
    assert "host gaps" not in [part.name for part in result.parts]
    console = Console(width=200, file=StringIO())
    console.print(profile.render(result))
    assert "codec and model run concurrently" in console.file.getvalue()


def test_the_time_of_a_step_is_shared_by_the_batch() -> None:
    parts = [ProfiledPart("prefill", 10.0, "request"), ProfiledPart("codec", 4.0, "step", bytes_read=8_000_000)]
    result = RequestProfile("m", {"device": "d", "torch": "t"}, "eager", 64, 1e9, parts, {1: 1.0})
    assert [part.name for part in result.bottlenecks] == ["prefill", "codec"]
    assert parts[1].of_request(64) == 4.0 * profile.FRAMES / 64
    assert parts[1].bandwidth() == 2e9


@pytest.mark.parametrize("integers", [pytest.param(True, marks=needs_vnni), False])
def test_weights_can_be_quantized_for_the_profile(monkeypatch: pytest.MonkeyPatch, integers: bool) -> None:
    monkeypatch.setattr(apply, "has_int8_matmul", lambda: integers)
    monkeypatch.setattr(profile, "SECONDS", 0.0)
    monkeypatch.setattr(profile, "FRAMES", 4)
    monkeypatch.setattr(apply, "MIN_INT8_WEIGHTS", 1000)  # the weights of this model are below the default minimum
    plain, small = (profile.run_profile("random:tiny", device="cpu", quantize=each) for each in (None, "int8"))
    read = [next(part.bytes_read for part in result.parts if part.name == "slow step") for result in (plain, small)]
    assert read[1] < 0.6 * read[0]


def test_unknown_weight_modes_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match="int9"):
        profile.run_profile("random:tiny", device="cpu", quantize="int9")
