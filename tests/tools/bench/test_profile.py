import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.codec.streaming import StreamingDecoder
from shoal.engine.execution import fallback
from shoal.engine.output.audio_decoder import AudioDecoder
from shoal.errors import InvalidRequest
from shoal.native.codec import NativeDecoder
from shoal.quantize import apply
from shoal.quantize.modes import has_int8_matmul
from shoal.tools.bench import profile
from shoal.tools.bench.document import read_document
from shoal.tools.bench.machine import describe_client
from shoal.tools.bench.profile import ProfiledPart, RequestProfile
from shoal.tools.bench.report.compare import pairs
from shoal.tools.bench.report.page import page
from shoal.tools.bench.report.tables import tables
from tests.tools.bench.documents import check_schema

needs_vnni = pytest.mark.skipif(not has_int8_matmul(), reason="this CPU has no VNNI")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start on the backend whose steps are timed part by part."""
    monkeypatch.setattr(fallback, "best_backend", lambda runner: "eager")


@pytest.mark.usefixtures("eager")
def test_every_part_of_a_request_is_timed_and_the_largest_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SECONDS", 0.0)
    monkeypatch.setattr(profile, "FRAMES", 4)
    document = json.loads(profile.run_profile("random:tiny", device="cpu", voices=2).as_json())
    check_schema(document)
    result = document["runs"][0]
    parts = {part["name"]: part for part in result["parts"]}
    assert list(parts) == [
        "tokenize", "prefill", "slow step", "fast steps", "sampling", "codec", "encode", "host gaps"
    ]  # fmt: skip
    assert [step["voices"] for step in result["steps"]] == [1, 2]
    assert result["ceiling"] > 0
    assert len(result["bottlenecks"]) == 3
    assert parts["slow step"]["memory"] > parts["slow step"]["bytes_read"] > 0  # also the KV cache
    assert all(part["gpu_busy"] is None for part in parts.values())


def test_the_native_backend_is_timed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SECONDS", 0.0)
    monkeypatch.setattr(profile, "FRAMES", 4)
    result = profile.run_profile("random:tiny", device="cpu", voices=2)
    assert result.backend == "native"
    assert [part.name for part in result.parts if part.per == "step"] == ["frame", "codec", "host gaps"]


def test_a_profile_is_drawn_and_compared_by_the_report(tmp_path: Path) -> None:
    machine = describe_client()
    parts = [
        ProfiledPart("prefill", 2.0, "request"),
        ProfiledPart("slow step", 1.0, "step", 4_000_000, 5_000_000, 1_000, 0.5),
        ProfiledPart("codec", 0.5, "step"),
    ]
    before, after = (
        RequestProfile("m", machine, "graph", 4, 1e9, [first, *parts[1:]], {1: 1.0, 4: 1.5}, beside=True)
        for first in (parts[0], replace(parts[0], milliseconds=3.0))
    )
    file = tmp_path / "profile.json"
    file.write_text(after.as_json())
    document = read_document(file)
    html = page([document])
    assert "Where the time goes" in html
    assert "slow step: 1 ms" in html
    row = next(row for row in tables(document)[0].rows if row[0] == "slow step")
    # 64 frames of a batch of four: 16 ms of 3 + 16 + 8
    assert row[1:] == ["1 ms", "step", "59.3 %", "4", "400.0 %", "5 MB", "1 kB", "50.0 %"]
    comparison = pairs([before.document(), document])[0]
    assert [(change.metric, change.verdict) for change in comparison.changed] == [("prefill per request", "worse")]


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


@pytest.mark.usefixtures("eager")
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
