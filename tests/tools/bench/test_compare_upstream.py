"""The comparison with a fish-speech checkout: the request that both sides get, and the table."""

import json
import sys
from pathlib import Path

import pytest

from scripts.compare_upstream import COLUMNS, commit_of, run_shoal, run_upstream, table
from scripts.upstream_request import import_layers_only
from shoal.checkpoint.random import random_checkpoint
from shoal.checkpoint.save import save_random


def figures(frames: int, seconds: float, **others: object) -> dict[str, object]:
    fixed = {"start": 1.0, "warm_up": 2.0, "memory": 3_500_000_000, "frame_rate": 20.0}
    return {"frames": frames, "seconds": seconds, "first_audio": seconds, **fixed, **others}


def test_the_table_has_one_line_per_run() -> None:
    results = {"Shoal": figures(200, 0.25, first_audio=0.0065), "upstream, eager": figures(100, 8.0, model_seconds=5.0)}
    lines = table(results).splitlines()
    assert lines[0].split("|")[1:-1] == [f" {name} " for name in COLUMNS]
    assert lines[2] == "| Shoal |  | 800 | 0.0250 | 6.5 ms | 1.0 s | 2.0 s | 3.50 GB |"
    assert lines[3] == "| upstream, eager | 20 | 12 | 1.6000 | 8,000.0 ms | 1.0 s | 2.0 s | 3.50 GB |"


def test_shoal_runs_the_request_and_writes_it_down_for_upstream(tmp_path: Path) -> None:
    model, plan = tmp_path / "model", tmp_path / "plan.json"
    checkpoint = random_checkpoint("tiny")
    save_random(model, checkpoint)
    found = run_shoal(plan, str(model), "cpu", 5)
    assert found["frames"] == 5
    assert 0 < found["first_audio"] <= found["seconds"]
    asked = json.loads(plan.read_text())
    assert len(asked["prompt"]) == 1 + checkpoint.model.config.num_codebooks
    assert (asked["frames"], asked["stop_id"]) == (5, checkpoint.model.config.stop_id)


def test_another_directory_is_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not a checkout of fish-speech"):
        commit_of(tmp_path)


def test_a_failure_of_upstream_shows_the_end_of_its_output(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=r"upstream \(eager\) failed with exit code 3:\nno such model"):
        run_upstream(tmp_path, str(python), tmp_path / "plan.json", "eager")


def test_the_layers_are_imported_where_the_packages_around_them_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("audiotools", "audiotools/ml", "audiotools/ml/layers", "dac", "dac/model", "dac/nn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import a_package_that_is_not_installed\n")
    (tmp_path / "audiotools/ml/layers/base.py").write_text("class BaseModel: pass\n")
    (tmp_path / "dac/nn/layers.py").write_text("from audiotools.ml import BaseModel\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    try:
        import_layers_only()
        from dac.nn.layers import BaseModel

        assert BaseModel.__module__ == "audiotools.ml.layers.base"
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
