"""`shoal simulate` with files written by `bench engine` and `load`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.errors import InvalidRequest
from shoal.tools.bench.document import write_document
from shoal.tools.bench.engine import run_engine_bench
from shoal.tools.bench.load.client import parse_target
from shoal.tools.bench.load.run import LoadPlan, run_load
from shoal.tools.bench.load.stage import parse_stages
from tests.tools.bench.virtual import VirtualLoop, VirtualServer


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulate") / "engine.json"
    write_document(path, run_engine_bench("random:tiny", device="cpu", batches=(1, 4), quick=True, progress=False))
    return path


def test_a_fleet_is_simulated_from_a_benchmark_of_the_engine(costs: Path) -> None:
    flags = ["--rate", "2", "--seconds", "10", "--gpus", "2", "--strategy", "round-robin"]
    document = json.loads(CliRunner().invoke(app, ["simulate", "--costs", str(costs), *flags, "--json"]).stdout)
    assert [(run["strategy"], run["gpus"], run["failed"]) for run in document["runs"]] == [("round-robin", 2, 0)]


def runs(*arguments: str) -> list[dict[str, float]]:
    document = json.loads(CliRunner().invoke(app, ["simulate", *arguments, "--json"]).stdout)
    return list(document["runs"])


def test_a_cell_of_a_fleet_waits_as_long_as_a_fleet_of_its_size(costs: Path) -> None:
    common = ("--costs", str(costs), "--seconds", "20", "--strategy", "least-connections", "--seed", "1")
    (whole,) = runs(*common, "--rate", "84", "--cells", "20", "--gpus", "40")
    (cell,) = runs(*common, "--rate", "4.2", "--gpus", "2")
    assert whole["first_audio_p95"] == cell["first_audio_p95"]
    assert (whole["gpus"], whole["requests"]) == (40, 20 * cell["requests"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpus 2 --cells 3", "2 GPUs cannot be divided into 3 equal cells"),
        ("--gpus 41 --cells 20", "use a multiple of --cells"),
        ("--gpus 1000000", "raise --cells"),
        ("--rate 1e9", "lower --rate or --seconds"),
        ("--rate 0.001 --seconds 1", "the traffic has no requests"),
    ],
)
def test_an_invalid_fleet_is_rejected_with_advice(costs: Path, flags: str, message: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "--costs", str(costs), *flags.split()])
    assert isinstance(result.exception, InvalidRequest)
    assert message in str(result.exception)


def test_every_figure_fits_into_a_terminal_of_80_columns(costs: Path) -> None:
    flags = ["--rate", "2", "--seconds", "10", "--gpus", "2", "--gpu-hour", "1234.5"]
    shown = CliRunner().invoke(app, ["simulate", "--costs", str(costs), *flags], env={"COLUMNS": "80"}).stdout
    assert all(name in shown for name in ("round-robin", "least-connections", "voice-affinity", "TTFA p50"))
    assert shown.count("2,469.00") == 3
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_check_simulates_the_requests_of_the_load_test(
    costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncio.events.new_event_loop", VirtualLoop)
    plan = LoadPlan(parse_stages("1,2", "open", seconds=20.0))
    server = VirtualServer(first=0.2, gap=0.05, slots=4)
    measured = run_load([parse_target("http://fake:1")], plan, progress=False, http=server)
    write_document(tmp_path / "load.json", measured)
    check = ["simulate", "--costs", str(costs), "--check", str(tmp_path / "load.json")]
    document = json.loads(CliRunner().invoke(app, [*check, "--json"]).stdout)
    first = next(each for each in document["figures"] if each["figure"] == "first audio P50")
    assert first["stage"] == "1 requests/s"
    assert first["measured"] == pytest.approx(measured["runs"][0]["stages"][0]["first_audio"]["p50"], rel=0.05)
    assert first["off"] == pytest.approx(first["simulated"] / first["measured"] - 1, abs=1e-3)
    shown = CliRunner().invoke(app, check)
    assert shown.exit_code == 0
    assert "speech P95" in shown.stdout
