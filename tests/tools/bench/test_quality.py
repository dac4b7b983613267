"""`shoal bench quality`: clips of every configuration and their comparison."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import GenerationFailed, InvalidRequest, MissingExtra, VerificationFailed
from shoal.tools.bench import quality
from shoal.tools.bench.configurations import Configuration, parse_configurations
from shoal.tools.bench.progress import progress_bar
from shoal.tools.bench.quality import (
    JUDGES,
    QualityPlan,
    check_within,
    read_sentences,
    run_of,
    run_quality,
    speak_all,
    write_clips,
)
from tests.tools.bench.documents import check_schema


def plan(*configurations: Configuration, **changes: object) -> QualityPlan:
    return QualityPlan("random:tiny", "cpu", list(configurations) or parse_configurations(["default"]), 2, **changes)  # type: ignore[arg-type]


def test_every_configuration_speaks_the_same_sentences(tmp_path: Path) -> None:
    wanted = plan(*parse_configurations(["default", "no-prefix-cache"]), Configuration("new", {"antigravity": 1}))
    with progress_bar(1, shown=False) as bar:
        reasons = speak_all(wanted, ["Hello.", "Good night."], tmp_path, bar)
    clips = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert [(clip["system"], clip["text"]) for clip in clips] == [
        (name, text) for name in ("default", "no-prefix-cache") for text in ("Hello.", "Good night.")
    ]
    sounds = [(tmp_path / clip["path"]).read_bytes() for clip in clips]
    assert sounds[:2] == sounds[2:]
    assert "antigravity" in reasons["new"]


def test_clips_for_judges_elsewhere_are_the_same_with_several_sentences_concurrency(tmp_path: Path) -> None:
    for concurrency in (1, 2):
        write_clips(plan(concurrency=concurrency), tmp_path / str(concurrency), progress=False)
    manifests = [(tmp_path / name / "manifest.jsonl").read_text() for name in "12"]
    assert manifests[0] == manifests[1]
    for line in manifests[0].splitlines():
        one, two = ((tmp_path / name / json.loads(line)["path"]).read_bytes() for name in "12")
        assert one == two


def test_an_interrupt_keeps_the_clips_that_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ThreadPoolExecutor):
        def map(self, *arguments: Any, **options: Any) -> Iterator[Any]:
            yield from islice(super().map(*arguments, **options), 1)
            raise KeyboardInterrupt

    monkeypatch.setattr(quality, "ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_clips(plan(), tmp_path / "clips", progress=False)
    (clip,) = map(json.loads, (tmp_path / "clips" / "manifest.jsonl").read_text().splitlines())
    assert (tmp_path / "clips" / clip["path"]).is_file()


def test_a_missing_baseline_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GenerationFailed), progress_bar(1, shown=False) as bar:
        speak_all(plan(Configuration("new", {"antigravity": 1})), ["a", "b"], tmp_path, bar)


def test_sentences_come_from_a_file_or_are_built_in(tmp_path: Path) -> None:
    assert len(read_sentences(plan())) == 2
    path = tmp_path / "text"
    path.write_text("One.\n\n Two. \nThree.\n")
    assert read_sentences(plan(text=path)) == ["One.", "Two."]
    path.write_text("One.")
    for wrong in (path, tmp_path / "missing"):
        with pytest.raises(InvalidRequest):
            read_sentences(plan(text=wrong))


def test_the_judges_report_becomes_a_run() -> None:
    report = {
        "reference": "default",
        "systems": [
            {"system": "int8", "voice": "own", "clips": 2, "metrics": {"wer": 1.0}},
            {"system": "int8", "voice": "all", "clips": 2, "metrics": {"wer": 9.0, "mos": 3.0}},
        ],
        "comparisons": [
            {"metric": "wer", "before": "default", "after": "int8", "difference": 0.5, "low": -1.0, "high": 2.0},
            {"metric": "wer", "before": "int8", "after": "other", "difference": 7.0, "low": None, "high": None},
        ],
    }
    run = run_of(Configuration("int8", {"quantize": "int8"}), report, {})
    assert (run["clips"], run["metrics"]["wer"]) == (2, 9.0)
    assert run["differences"] == {"wer": {"difference": 0.5, "low": -1.0, "high": 2.0}}
    missing = run_of(Configuration("fp8", {}), report, {"fp8": "not on this CPU"})
    assert (missing["reason"], missing["clips"], missing["metrics"]) == ("not on this CPU", 0, {})


def scored(name: str, mos: float, difference: tuple[float, float] | None = None) -> dict[str, object]:
    low_high = {} if difference is None else {"mos": {"difference": 0.0, "low": difference[0], "high": difference[1]}}
    return {"name": name, "metrics": {"mos": mos}, "differences": low_high}


def test_a_configuration_passes_when_its_interval_rules_a_larger_loss_out() -> None:
    runs = [scored("eager", 3.0), scored("default", 3.0, (-0.01, 0.01)), scored("kv-int8", 2.95, (-0.14, 0.04))]
    check_within({"runs": runs}, 5)
    with pytest.raises(VerificationFailed, match=r"within 4 % of eager \(.*-0\.12\): kv-int8: -0\.14;"):
        check_within({"runs": runs}, 4)


def test_a_configuration_that_was_not_measured_does_not_pass() -> None:
    with pytest.raises(VerificationFailed, match="kv-fp8: not measured"):
        check_within({"runs": [scored("eager", 3.0), scored("kv-fp8", 3.0)]}, 5)


def test_missing_judges_or_checkout_raise_an_error_with_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quality, "JUDGES", ("no_such_judge",))
    with pytest.raises(MissingExtra, match="make quality"):
        run_quality(plan(), progress=False)
    monkeypatch.setattr(quality, "ROOT", tmp_path)
    with pytest.raises(MissingExtra, match="checkout"):
        run_quality(plan(), progress=False)


@pytest.mark.quality
@pytest.mark.skipif(any(find_spec(name) is None for name in JUDGES), reason="needs the judges: make quality")
def test_the_real_judges_rate_every_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = plan(*parse_configurations(["default", "no-prefix-cache"]))
    document = run_quality(wanted, tmp_path / "clips", progress=False)
    check_schema(document)
    assert document["complete"]
    assert [run["clips"] for run in document["runs"]] == [2, 2]
    assert document["runs"][1]["differences"]["wer"]["difference"] == 0.0
