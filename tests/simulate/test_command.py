"""`shoal simulate` from files that the other commands wrote."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.bench.document import write_document
from shoal.bench.engine import run_engine_bench
from shoal.bench.load.client import parse_target
from shoal.bench.load.run import Plan, run_load
from shoal.bench.load.stage import parse_stages
from shoal.cli import app
from tests.bench.virtual import VirtualLoop, VirtualServer


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulate") / "engine.json"
    write_document(path, run_engine_bench("random:tiny", device="cpu", batches=(1, 4), quick=True, progress=False))
    return path


def test_a_fleet_is_simulated_from_a_benchmark_of_the_engine(costs: Path) -> None:
    flags = ["--rate", "2", "--seconds", "10", "--gpus", "2", "--strategy", "round-robin"]
    told = json.loads(CliRunner().invoke(app, ["simulate", "--costs", str(costs), *flags, "--json"]).stdout)
    assert [(run["strategy"], run["gpus"], run["failed"]) for run in told["runs"]] == [("round-robin", 2, 0)]


def test_a_load_test_is_simulated_with_its_own_requests(
    costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncio.events.new_event_loop", VirtualLoop)
    plan = Plan(parse_stages("1,2", open=True, seconds=20.0))
    server = VirtualServer(first=0.2, gap=0.05, slots=4)
    measured = run_load([parse_target("http://fake:1")], plan, progress=False, transport=server)
    write_document(tmp_path / "load.json", measured)
    check = ["simulate", "--costs", str(costs), "--check", str(tmp_path / "load.json")]
    told = json.loads(CliRunner().invoke(app, [*check, "--json"]).stdout)
    first = next(each for each in told["figures"] if each["figure"] == "first audio P50")
    assert first["stage"] == "1 requests/s"
    assert first["measured"] == pytest.approx(measured["runs"][0]["stages"][0]["first_audio"]["p50"], rel=0.05)
    assert first["off"] == pytest.approx(first["simulated"] / first["measured"] - 1, abs=1e-3)
    shown = CliRunner().invoke(app, check)
    assert shown.exit_code == 0
    assert "speech P95" in shown.stdout
