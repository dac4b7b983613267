"""`shoal batch` as a person runs it: to the end, killed, interrupted, and again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.api.engine_client import EngineHandle
from shoal.batch.lines import InputFile, LineDefaults
from shoal.batch.manifest import MANIFEST, Manifest
from shoal.batch.run import plan_batch, run
from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.engine import Engine
from shoal.engine.load import voice_cache
from shoal.engine.utterance import Event, Utterance
from shoal.errors import InvalidRequest
from shoal.voices.store import VoiceStore
from tests.server.conftest import ROOT, samples_of, surroundings

LONG = {"max_new_tokens": 60, "temperature": 1.5, "top_p": 1.0, "seed": 10}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def entries(out: Path) -> dict[int, dict[str, object]]:
    return {entry["line"]: entry for entry in map(json.loads, (out / MANIFEST).read_text().splitlines())}


class GatedCore(EngineCore):
    """Takes no step before as many utterances have arrived as there are slots; counts those that run at a time."""

    arrived = most = 0

    def add(self, utterance: Utterance) -> None:
        self.arrived += 1
        super().add(utterance)

    def step(self, emit: Callable[[Event], None] | None = None) -> list[Event]:
        if self.arrived < self.config.slots:
            return []
        events = super().step(emit)
        self.most = max(self.most, len(self.scheduler.running))
        return events


def test_many_lines_are_in_flight_at_one_time_and_each_sounds_as_if_alone(tiny: Checkpoint, tmp_path: Path) -> None:
    said = [{"text": f"Line {number}.", "max_new_tokens": 12, "seed": 3} for number in range(8)]
    source = InputFile(write(tmp_path / "in.jsonl", *said, *said), LineDefaults("tiny"))
    core = GatedCore(tiny, EngineConfig(slots=4, guard=False))
    with Engine(core, voice_cache(tiny, tmp_path / "voices")) as engine, Manifest.opened(tmp_path / "out") as manifest:
        loaded = EngineHandle(engine.service, VoiceStore(tmp_path / "voices"), 1.0)
        run(plan_batch(source, manifest), source, loaded, manifest, 8, lambda task, entry: None)
    reported = entries(tmp_path / "out")
    assert [reported[line]["audio_seconds"] for line in sorted(reported)] == [0.48] * 16
    assert core.most == 4
    files = [(tmp_path / "out" / f"{line:06d}.wav").read_bytes() for line in range(1, 17)]
    assert files[:8] == files[8:]


@pytest.mark.parametrize(("name", "expected"), [("in.jsonl", "JSON object"), ("in.txt", "text")])
def test_an_empty_input_is_refused_with_what_it_should_have(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / name).touch()
    with Manifest.opened(tmp_path / "out") as manifest, pytest.raises(InvalidRequest, match=f"one {expected} per line"):
        plan_batch(InputFile(tmp_path / name, LineDefaults("tiny")), manifest)


def test_the_seconds_of_a_line_are_those_of_its_file(tiny: Checkpoint, tmp_path: Path) -> None:
    line = {"text": "Line.", "max_new_tokens": 12, "seed": 3, "format": "pcm", "prosody": {"speed": 2.0}}
    source = InputFile(write(tmp_path / "in.jsonl", line), LineDefaults("tiny"))
    core = EngineCore(tiny, EngineConfig(slots=1, guard=False))
    with Engine(core, voice_cache(tiny, tmp_path / "voices")) as engine, Manifest.opened(tmp_path / "out") as manifest:
        loaded = EngineHandle(engine.service, VoiceStore(tmp_path / "voices"), 1.0)
        run(plan_batch(source, manifest), source, loaded, manifest, 1, lambda task, entry: None)
    (entry,) = entries(tmp_path / "out").values()
    written = len((tmp_path / "out" / "000001.pcm").read_bytes()) / 2 / tiny.codec.config.sample_rate
    assert entry["audio_seconds"] == pytest.approx(written, abs=0.001)


def start(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.cli", "batch", "in.jsonl", "-o", "out", "--model", "random:tiny", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=surroundings(tmp_path) | {"PYTHONPATH": str(ROOT)},
    )


def until_done(process: subprocess.Popen[str], out: Path, lines: int) -> None:
    manifest = out / MANIFEST
    while not manifest.exists() or manifest.read_text().count('"done"') < lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_a_killed_or_interrupted_batch_resumes(tmp_path: Path) -> None:
    said = [{"text": f"Line {number}.", **LONG} for number in range(16)]
    write(tmp_path / "in.jsonl", *said, "not json", {"text": "Who?", "voice": "nobody"}, {**said[0], "id": "last"})
    out = tmp_path / "out"

    killed = start(tmp_path, "--slots", "2")
    until_done(killed, out, 3)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    first = {path: path.stat().st_mtime_ns for path in out.glob("*.wav")}
    journalled = {str(entry.get("file")) for entry in entries(out).values()}

    interrupted = start(tmp_path, "--slots", "2")
    until_done(interrupted, out, len(journalled) + 3)
    interrupted.send_signal(signal.SIGINT)
    _, reported = interrupted.communicate(timeout=240)
    assert interrupted.returncode == 130
    kept = re.search(r"interrupted: (\d+) of 18 lines are done; run the same command again to resume", reported)
    assert kept is not None, reported
    assert not list(out.glob(".*.part"))
    second = {path.name: path.stat().st_mtime_ns for path in out.glob("*.wav")}

    whole = start(tmp_path, "--slots", "8", "--json")
    reported, faults = whole.communicate(timeout=240)
    assert whole.returncode == 1, faults
    assert "line 17: the line is not JSON" in faults
    assert "line 18: there is no voice 'nobody'" in faults
    summary = json.loads(reported)
    assert (summary["done"] + summary["done_before"], summary["failed"]) == (17, 2)
    assert summary["done_before"] == int(kept[1]) >= 6

    # What was in the books was not touched again, and every file is whole.
    for path, stamp in first.items():
        assert path.name not in journalled or path.stat().st_mtime_ns == stamp
    assert sum((out / name).stat().st_mtime_ns == stamp for name, stamp in second.items()) >= summary["done_before"]
    reported_entries = entries(out)
    assert sorted(reported_entries) == list(range(1, 20))
    assert all(len(samples_of(path.read_bytes())) == 60 * 640 for path in out.glob("*.wav"))
    assert (out / "last.wav").exists()
