import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal.bench import engine as bench
from shoal.bench.engine import QUICK, Result, last_line, measure_scheduler, render, run_engine_bench
from shoal.cli import app
from shoal.errors import ModelNotFound, OutputError


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    path = tmp_path_factory.mktemp("bench") / "engine.json"
    measured = run_engine_bench("random:tiny", device="cpu", json_path=path, quick=True, progress=False)
    assert json.loads(path.read_text()) == measured
    return measured


def shown(result: Result) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(render(result))
    return captured.get()


def test_every_policy_is_measured_at_every_batch_size(result: Result) -> None:
    rows = result["throughput"]
    assert {(row["voices"], row["policy"]) for row in rows} == {
        (voices, policy) for voices in (1, 4, 16) for policy in ("continuous", "dynamic", "static")
    }
    for row in rows:
        assert row["utterances"] == row["voices"] * QUICK.utterances
        assert row["frames"] > 0
        assert row["rtf"] == pytest.approx(1 / row["audio_per_second"])
        assert row["model_seconds"] + row["codec_seconds"] <= row["seconds"]


def test_whoever_may_join_at_any_frame_needs_fewer_steps(result: Result) -> None:
    steps = {(row["voices"], row["policy"]): row["steps"] for row in result["throughput"]}
    for voices in (4, 16):
        assert steps[voices, "continuous"] < steps[voices, "static"]


def test_a_known_voice_saves_its_columns(result: Result) -> None:
    first = result["first_audio"]
    assert first["unknown"]["columns_saved"] == 0
    assert first["known"]["columns_saved"] > first["prompt_columns"] / 2
    assert first["known"]["cpu_seconds"] > 0


def test_figures_name_the_machine_and_the_versions(result: Result) -> None:
    assert result["complete"]
    assert {"device", "cores", "threads", "python", "torch", "shoal", "rung"} <= result["machine"].keys()
    assert json.loads(last_line(result)) == result
    assert "\n" not in last_line(result)


def test_the_tables_show_what_was_measured(result: Result) -> None:
    text = shown(result)
    for words in ("random:tiny", "continuous", "dynamic", "static", "prefix cache", "sequence-steps/s"):
        assert words in text


def test_the_scheduler_keeps_all_slots_busy() -> None:
    figures = measure_scheduler(50, voices=8, prompt=20, frames=70)
    assert figures["sequence_steps"] > 8 * 40
    assert figures["sequence_steps_per_cpu_second"] > 0


def test_an_interrupt_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_throughput", interrupt)
    path = tmp_path / "engine.json"
    answer = CliRunner().invoke(
        app, ["bench", "engine", "--model", "random:tiny", "--device", "cpu", "--quick", "--json", str(path)]
    )
    assert answer.exit_code == 130
    kept = json.loads(answer.stdout.splitlines()[-1])
    assert not kept["complete"]
    assert kept["scheduler"]["sequence_steps"] > 0
    assert json.loads(path.read_text()) == kept
    assert "interrupted" in shown(kept)


def test_what_cannot_be_measured_or_written_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        run_engine_bench("random:huge", device="cpu", progress=False)
    monkeypatch.setattr(bench, "measure", lambda *_: None)
    with pytest.raises(OutputError):
        run_engine_bench("random:tiny", device="cpu", json_path=tmp_path / "no" / "such", progress=False)
