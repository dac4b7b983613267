"""One worker of a batch on Ray, without Ray: the cluster's own tests run it there."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.batch.distribute import BatchWorker
from shoal.batch.lines import InputFile, LineDefaults, LineTask
from shoal.batch.manifest import Manifest
from shoal.batch.run import plan_batch
from shoal.config import EngineConfig
from shoal.engine.process.worker import EngineSource
from shoal.errors import InvalidRequest

SOURCE = EngineSource("random:tiny", "cpu", config=EngineConfig(slots=2, guard=False, kv_bytes=1 << 20))


def columns(tasks: list[LineTask]) -> dict[str, np.ndarray[Any, Any]]:
    """Return tasks as a block of Ray Data."""
    return {each.name: np.array([getattr(task, each.name) for task in tasks]) for each in fields(LineTask)}


def test_a_worker_reads_its_lines_by_their_place_and_reports_those_that_have_changed(tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out"
    said = [{"text": text, "max_new_tokens": 6, "seed": 3} for text in ("One.", "Two.", "Six.")]
    path.write_text("".join(json.dumps(line) + "\n" for line in said))
    lines = InputFile(path, LineDefaults("random:tiny"))
    with Manifest.opened(out) as manifest:
        tasks = plan_batch(lines, manifest).tasks
        path.write_text(path.read_text().replace("Six.", "Ten."))
        worker = BatchWorker(SOURCE, tmp_path / "voices", out, lines)
        try:
            reported = worker(columns(tasks[1:]))
        finally:
            worker._speaker.loaded.service.close()
            worker._journal.close()
        assert sorted(zip(reported["line"], reported["status"], strict=True)) == [(2, "done"), (3, "failed")]
        assert "the input has changed since the batch started: run the batch again" in reported["error"]
        assert manifest.count(tasks) == 1
    assert [path.name for path in out.glob("*.wav")] == ["000002.wav"]


def test_a_worker_that_cannot_read_the_input_says_so_before_it_loads_anything(tmp_path: Path) -> None:
    lines = InputFile(tmp_path / "elsewhere.jsonl", LineDefaults("no-such-model"))
    with pytest.raises(InvalidRequest, match=r"No such file or directory.*: put the input on storage"):
        BatchWorker(EngineSource("no-such-model"), tmp_path, tmp_path, lines)
