"""`shoal bench`: measurement of configurations in their own processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.random import random_checkpoint
from shoal.errors import GenerationFailed, InvalidRequest, ModelNotFound
from shoal.tools.bench.configurations import (
    PRESETS,
    Configuration,
    available_settings,
    missing_settings,
    parse_configurations,
    recommended,
)
from shoal.tools.bench.document import Document
from shoal.tools.bench.percentiles import Percentiles
from shoal.tools.bench.sweep import Sweep, figures, require_figures, run_sweep
from shoal.tools.bench.texts import SENTENCES, edge_cases, sentence, text_of
from shoal.tools.bench.trial import TrialConfig
from tests.cli.conftest import Shoal, shoal  # noqa: F401
from tests.tools.bench.documents import check_schema


def job(**changes: object) -> TrialConfig:
    default = TrialConfig("random:tiny", "cpu", {}, (1, 3), 2, 2, 1, 1, True, None, True, 6)
    return TrialConfig(**{name: changes.get(name, getattr(default, name)) for name in TrialConfig.__slots__})


@pytest.fixture(scope="module")
def document() -> Document:
    made_up = Configuration("from the future", {"antigravity": True})
    impossible = Configuration("impossible", {"quantize": "int3"})
    sweep = Sweep(job(), [*parse_configurations(["no-prefix-cache"]), made_up, impossible], price=2.0)
    return run_sweep(sweep, progress=False)


def test_a_configuration_is_measured_from_its_start_to_its_edge_cases(document: Document) -> None:
    assert document["complete"]
    check_schema(document)
    assert 0 <= document["machine"]["others_cpu"] <= 1
    run = document["runs"][0]
    assert run["reason"] is None
    assert run["settings"] == {"prefix_cache": False}
    assert run["startup"]["cold"]["load"] > 0
    assert run["startup"]["warm"]["warm_up"] > 0
    memory = run["memory"]
    assert memory["kind"] == "RSS"
    assert 0 < memory["baseline"] < memory["peak"]
    checkpoint = random_checkpoint("tiny", dtype=torch.float32, device="cpu")
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in checkpoint.model.parameters()}
    assert memory["model"] >= sum(weights.values())
    assert memory["codec"] > 0
    assert memory["kv"] > 0
    assert {edge["characters"] for edge in run["edges"]} == {len(text) for text in edge_cases().values()}
    assert all(edge["error"] is None and edge["audio_seconds"] > 0 for edge in run["edges"])


def test_figures_follow_from_the_requests(document: Document) -> None:
    one, three = document["runs"][0]["batches"]
    assert (one["voices"], three["voices"]) == (1, 3)
    assert (len(one["requests"]), len(three["requests"])) == (2 * 2, 2 * 3)
    for batch in (one, three):
        assert batch["errors"] == 0
        assert batch["audio_seconds"] == pytest.approx(sum(each["audio_seconds"] for each in batch["requests"]))
        assert batch["rtf"] == pytest.approx(1 / batch["audio_per_second"])
        assert batch["cost_per_audio_hour"] == pytest.approx(2.0 * batch["rtf"])
        assert batch["frames"] == sum(each["frames"] for each in batch["requests"])
        assert batch["latency"]["count"] == len(batch["requests"])
        assert all(0 < each["first_audio"] <= each["seconds"] for each in batch["requests"])


def test_unavailable_configurations_get_a_reason_and_the_others_run(document: Document) -> None:
    missing = {run["name"]: run["reason"] for run in document["runs"] if run["reason"]}
    assert missing["from the future"] == "this build has no setting antigravity"
    assert "int3" in missing["impossible"]


def test_figures_of_known_rounds() -> None:
    def request(seconds: float, audio: float, error: str | None = None) -> dict:
        return {"seconds": seconds, "first_audio": 0.1, "audio_seconds": audio, "frames": 10, "error": error}

    rounds = [
        {"voices": 2, "seconds": 2.0, "cpu_seconds": 3.0, "requests": [request(1.0, 4.0), request(2.0, 4.0)]},
        {
            "voices": 2,
            "seconds": 2.0,
            "cpu_seconds": 5.0,
            "requests": [request(2.0, 8.0), request(1.0, 0.0, "GenerationFailed: no")],
        },
    ]
    found = figures(2, rounds, price=8.0)
    assert (found["audio_per_second"], found["rtf"], found["frames_per_second"]) == (4.0, 0.25, 7.5)
    assert (found["cost_per_audio_hour"], found["cpu_per_audio_second"]) == (2.0, 0.5)
    assert (found["errors"], found["latency"]["count"]) == (1, 3)
    assert found["latency"]["p50"] == 2.0
    assert found["requests_per_second"] == 3 / 4


def test_a_request_without_audio_costs_time_and_has_no_first_audio() -> None:
    def request(audio: float, error: str | None = None) -> dict:
        first = 0.1 if audio else 0.0
        return {"seconds": 1.0, "first_audio": first, "audio_seconds": audio, "frames": int(10 * audio), "error": error}

    requests = [request(2.0), request(0.0), request(2.0, "GenerationFailed: in the middle")]
    found = figures(3, [{"voices": 3, "seconds": 1.0, "cpu_seconds": 1.0, "requests": requests}], None)
    assert (found["errors"], found["latency"]["count"]) == (1, 2)
    assert (found["first_audio"]["count"], found["first_audio"]["p50"]) == (1, 0.1)
    assert (found["request_rtf"]["count"], found["request_rtf"]["p50"]) == (1, 0.5)
    assert found["rounds"][0]["audio_seconds"] == found["audio_seconds"] == 2.0
    silent = figures(1, [{"voices": 1, "seconds": 1.0, "cpu_seconds": 1.0, "requests": [request(0.0)]}], 1.0)
    assert (silent["first_audio"], silent["request_rtf"], silent["rtf"]) == (None, None, None)


def test_every_preset_is_made_of_settings_this_build_has() -> None:
    for configuration in parse_configurations(["all"]):
        assert missing_settings(configuration) is None, configuration
    assert len(parse_configurations(["all", "bf16"])) == len(PRESETS)


def test_a_gpu_measures_all_types_of_weights_and_kv_cache_by_default() -> None:
    assert [each.name for each in parse_configurations(recommended("cuda:0"))] == [
        "bf16", "int8", "int8+codec", "fp8", "int4", "kv-int8", "kv-fp8"
    ]  # fmt: skip
    assert [each.name for each in parse_configurations(recommended("cpu"))] == ["default"]


def test_settings_are_parsed_by_their_type() -> None:
    found = parse_configurations(["token_budget=64,prefix_cache=false,quantize=slow=int8,codec=int8"])[0].settings
    assert found == {"token_budget": 64, "prefix_cache": False, "quantize": "slow=int8,codec=int8"}
    assert parse_configurations(["buckets=1,8,backend=fused"])[0].settings == {"buckets": (1, 8), "backend": "fused"}
    for wrong in (
        "bf17",
        "buckets=1,x",
        "token_budget=many",
        "prefix_cache=perhaps",
        "token_budget=1,what=2",
        "slots=4",
    ):
        with pytest.raises(InvalidRequest):
            parse_configurations([wrong])
    assert {"dtype", "policy", "backend"} <= available_settings().keys()


def test_a_missing_model_raises_an_error() -> None:
    with pytest.raises(ModelNotFound):
        run_sweep(Sweep(job(model="random:huge"), parse_configurations([]), cold=False), progress=False)


@pytest.mark.parametrize("size", [1, 1 << 20])  # a pipe does not hold the larger one, so writing it fails every time
def test_a_killed_trial_becomes_the_reason_of_its_run(size: int) -> None:
    dies = [sys.executable, "-c", "import os, sys; sys.stderr.write('out of memory\\n'); os.kill(os.getpid(), 9)"]
    sweep = Sweep(job(model="m" * size), parse_configurations(["default"]), cold=False)
    run = run_sweep(sweep, progress=False, command=lambda: dies)["runs"][0]
    assert run["reason"] == "its process ended with signal SIGKILL: out of memory"


def test_an_interrupt_keeps_finished_measurements(tmp_path: Path) -> None:
    """Interrupt a complete `shoal bench` during its second configuration."""
    path = tmp_path / "run.json"
    command = [sys.executable, "-m", "shoal.cli", "bench", "--model", "random:tiny", "--device", "cpu", "--quick"]
    command += ["--voices", "1", "--no-edge-cases", "-c", "default", "-c", "slow", "--json", str(path)]
    driver = tmp_path / "driver.py"
    # The second configuration never ends.
    driver.write_text(
        "import sys, time\n"
        "from shoal.tools.bench import configurations, sweep\n"
        "configurations.PRESETS['slow'] = {}\n"
        "default = sweep.measure\n"
        "def measure(configuration, *rest):\n"
        "    if configuration.name == 'slow':\n"
        "        print('waiting', file=sys.stderr, flush=True)\n"
        "        time.sleep(600)\n"
        "    default(configuration, *rest)\n"
        "sweep.measure = measure\n"
        f"sys.argv = {['shoal', *command[3:]]!r}\n"
        "from shoal.cli import main\n"
        "main()\n"
    )
    root = Path(__file__).parents[3]
    surroundings = os.environ | {"PYTHONPATH": str(root)}
    child = subprocess.Popen(
        [sys.executable, str(driver)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=surroundings
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "waiting" in line:
            break
    child.send_signal(signal.SIGINT)
    out, error = child.communicate(timeout=240)
    assert child.returncode == 130, error
    kept = json.loads(path.read_text())
    assert not kept["complete"]
    check_schema(kept)
    assert kept["runs"][0]["batches"][0]["requests"]
    assert "default" in out
    assert "interrupted" in error


def test_flags_before_a_subcommand_are_rejected(shoal: Shoal) -> None:  # noqa: F811
    run = shoal("bench", "--model", "random:tiny", "engine")
    assert run.code == 2
    assert "belongs after engine" in run.said
    assert shoal("bench", "--voices", "0").code == 2


def test_texts_differ_and_edge_cases_have_their_length() -> None:
    assert len({sentence(number) for number in range(SENTENCES)}) == SENTENCES
    assert [len(text_of(length)) for length in (2, 40, 5000)] == [2, 40, 5000]


def test_percentiles_of_known_values() -> None:
    found = Percentiles.of(range(1, 101))
    assert found is not None
    assert (found.count, found.mean, found.p50, found.min, found.max) == (100, 50.5, 50.5, 1, 100)
    assert found.p95 == pytest.approx(95.05)
    assert found.std == pytest.approx(29.01, abs=0.01)
    assert Percentiles.of([]) is None
    single = Percentiles.of([3.0])
    assert single is not None
    assert (single.std, single.p99) == (0.0, 3.0)


def test_a_benchmark_without_any_audio_fails_with_the_reason() -> None:
    request = {"error": "the model did not produce speech", "seconds": 1.0, "audio_seconds": 0.0, "frames": 0}
    rounds = [{"voices": 1, "seconds": 1.0, "cpu_seconds": 1.0, "requests": [request]}]
    run = {"name": "default", "reason": None, "batches": [figures(1, rounds, None)]}
    document: Document = {"complete": True, "runs": [run]}
    with pytest.raises(GenerationFailed, match=r"nothing could be measured: the model did not produce speech"):
        require_figures(document)
    request["error"], request["audio_seconds"], request["first_audio"] = None, 2.0, 0.5
    run["batches"] = [figures(1, rounds, None)]
    require_figures(document)


@pytest.mark.parametrize("place", ["nowhere/run.json", "."])
@pytest.mark.parametrize("flag", ["--json", "--html", "--markdown"])
def test_an_unwritable_file_is_rejected_before_the_measurement(
    shoal: Shoal,  # noqa: F811
    tmp_path: Path,
    flag: str,
    place: str,
) -> None:
    for command in (["bench"], ["bench", "engine"], ["bench", "scaling"], ["load", "http://127.0.0.1:1"]):
        began = time.monotonic()
        ran = shoal(*command, flag, tmp_path / place)
        assert (ran.code, "cannot be written" in ran.err) == (10, True), ran.err
        assert time.monotonic() - began < 240
