import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.engine.execution.fallback import BACKENDS
from shoal.engine.load import load
from shoal.errors import ModelNotFound, OutputError
from shoal.tools.bench import engine as bench
from shoal.tools.bench.document import Document, read_document
from shoal.tools.bench.engine import PARTS, QUICK, last_line, measure_scheduler, run_engine_bench
from shoal.tools.bench.report.compare import compare
from shoal.tools.bench.report.markdown import markdown
from shoal.tools.bench.trial import weight_modes
from tests.tools.bench.documents import check_schema

RUN = ["bench", "engine", "--model", "random:tiny", "--device", "cpu", "--quick"]


@pytest.fixture(scope="module")
def document() -> Document:
    measured = run_engine_bench("random:tiny", device="cpu", quick=True, progress=False)
    check_schema(measured)
    return measured


@pytest.fixture
def run(document: Document) -> dict[str, Any]:
    found: dict[str, Any] = document["runs"][0]
    return found


def test_every_policy_is_measured_at_every_batch_size(run: dict[str, Any]) -> None:
    rows = run["throughput"]
    assert {(row["voices"], row["policy"]) for row in rows} == {
        (voices, policy) for voices in (1, 4, 16) for policy in ("continuous", "dynamic", "static")
    }
    for row in rows:
        assert row["utterances"] == row["voices"] * QUICK.utterances
        assert row["frames"] > 0
        assert row["rtf"] == pytest.approx(1 / row["audio_per_second"])
        assert 0 < row["full_audio_per_second"] < 10 * row["audio_per_second"]
        assert row["model_seconds"] + row["codec_seconds"] <= row["seconds"]
        assert len(row["parts"]) == PARTS
        assert 0 < sum(row["parts"]) <= row["seconds"]
        assert len(row["waits"]) == row["first_audio"]["count"] == row["utterances"]
        assert 0 < sum(each["seconds"] for each in row["decodes"]) <= row["codec_seconds"]
        assert all(0 < each["chunks"] <= row["voices"] and each["frames"] > 0 for each in row["decodes"])
        assert sum(each["calls"] * each["all_frames"] for each in row["decodes"]) == row["frames"]


def test_the_codec_of_a_cpu_pads_its_chunks(run: dict[str, Any]) -> None:
    assert run["packed"] is False


def test_continuous_batching_needs_fewer_steps_than_static(run: dict[str, Any]) -> None:
    steps = {(row["voices"], row["policy"]): row["steps"] for row in run["throughput"]}
    for voices in (4, 16):
        assert steps[voices, "continuous"] < steps[voices, "static"]


def test_a_cached_voice_saves_its_tokens(run: dict[str, Any]) -> None:
    first = run["first_audio"]
    assert first["unknown"]["tokens_saved"] == 0
    assert first["known"]["tokens_saved"] > first["prompt_tokens"] / 2
    assert first["known"]["cpu_seconds"] > 0


def test_arrivals_have_a_share_of_the_measured_throughput(run: dict[str, Any]) -> None:
    arrivals = run["arrivals"]
    reached = next(row for row in run["throughput"] if row["voices"] == 16 and row["policy"] == "continuous")
    assert arrivals["requests"] == arrivals["first_audio"]["count"] == reached["utterances"]
    mean = sum(map(QUICK.frames_of, range(arrivals["requests"]))) / arrivals["requests"]
    assert arrivals["rate"] == pytest.approx(0.7 * reached["frames_per_second"] / mean)


def test_steps_are_timed_separately_without_gpu_utilisation_on_a_cpu(run: dict[str, Any]) -> None:
    assert [row["voices"] for row in run["steps"]] == [1, 4, 16]
    assert all(row["seconds"] > 0 for row in run["steps"])
    assert "gpu_busy" not in run


def test_figures_name_the_machine_and_the_versions(document: Document, run: dict[str, Any]) -> None:
    assert document["complete"]
    assert {"device", "cores", "threads", "python", "torch", "shoal"} <= document["machine"].keys()
    assert run["engine"]["dtype"] == "float32"
    assert run["engine"]["backend"] in BACKENDS
    assert json.loads(last_line(document)) == document
    assert "\n" not in last_line(document)


def test_the_tables_show_what_was_measured(document: Document) -> None:
    text = markdown([document])
    for words in (
        "random:tiny",
        "continuous",
        "dynamic",
        "static",
        "prefix cache",
        "Poisson",
        "without codec",
        "sequence-steps/s",
    ):
        assert words in text


def test_a_slowdown_of_every_part_is_detected(document: Document) -> None:
    before = {**document, "machine": {**document["machine"], "others_cpu": 0.0}}
    slower = json.loads(json.dumps(before))
    for row in slower["runs"][0]["throughput"]:
        row["parts"] = [1.3 * seconds for seconds in row["parts"]]
        row["audio_per_second"] /= 1.3
    assert compare(before, before).changed == []
    worse = compare(before, slower).worse
    assert {(change.where, change.metric) for change in worse} == {
        (f"{row['voices']} concurrent, {row['policy']}", "throughput") for row in document["runs"][0]["throughput"]
    }


def test_the_scheduler_keeps_all_slots_busy() -> None:
    figures = measure_scheduler(50, voices=8, prompt=20, frames=70)
    assert figures["sequence_steps"] > 8 * 40
    assert figures["sequence_steps_per_cpu_second"] > 0


def test_an_interrupt_keeps_finished_measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure_throughput", interrupt)
    path = tmp_path / "engine.json"
    answer = CliRunner().invoke(app, [*RUN, "--voices", "2", "--json", str(path)])
    assert answer.exit_code == 130
    kept = json.loads(answer.stdout.splitlines()[-1])
    assert not kept["complete"]
    assert kept["runs"][0]["scheduler"]["sequence_steps"] > 0
    assert read_document(path) == kept
    assert "interrupted" in answer.stderr


def test_missing_models_and_unwritable_files_raise_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        run_engine_bench("random:huge", device="cpu", progress=False)
    # The directory exists when the measurement starts and is gone at its end.
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.setattr(bench, "measure", lambda *_: shutil.rmtree(place, ignore_errors=True))
    answer = CliRunner().invoke(app, [*RUN, "--quiet", "--json", str(place / "run.json")])
    assert isinstance(answer.exception, OutputError)
    # The measurement is not lost.
    assert json.loads(answer.stdout)["kind"] == "engine"


def test_weights_that_the_native_backend_reads_as_stored_are_named() -> None:
    with load("nano", device="cpu") as engine:
        core = engine.service.core
        assert weight_modes(core) == ("int8 (as stored)" if core.runner.backend == "native" else "none")
