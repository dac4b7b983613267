"""`shoal bench`: the same texts under every configuration, each in a process of its own, one after the other.

Every configuration is started twice: once with empty caches of compiled code, as on a new machine, and once with what
the first start left there. The second one is measured.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from shoal import errors
from shoal.errors import CheckpointError, GenerationFailed, ModelNotFound, ShoalError, VoiceNotFound
from shoal.tools.bench.configurations import Configuration, missing_settings
from shoal.tools.bench.document import INTERRUPTS, Document, new_document
from shoal.tools.bench.machine import BackgroundLoad
from shoal.tools.bench.percentiles import summarize
from shoal.tools.bench.progress import BenchProgress, progress_bar
from shoal.tools.bench.trial import TrialConfig

# Where compilers keep what they made; pointed at an empty folder, every start is the first.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")

Run = dict[str, Any]
Child = subprocess.Popen[str]
Command = Callable[[], list[str]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to measure, and what an hour of the device costs."""

    job: TrialConfig
    configurations: list[Configuration]
    cold: bool = True
    price: float | None = None  # per hour
    currency: str = "USD"


def trial_command() -> list[str]:
    return [sys.executable, "-m", "shoal.tools.bench.trial"]


def run_sweep(sweep: Sweep, *, progress: bool = True, command: Command = trial_command) -> Document:
    """Measure all configurations. An interrupt keeps what is done, and `complete` stays false.

    Raises what is wrong with the model itself; a configuration that cannot be had is a run with a `reason`.
    """
    document = new_document("bench", machine_of(sweep.job.device), _settings(sweep))
    others = BackgroundLoad()
    with progress_bar(_total(sweep), shown=progress) as bar:
        try:
            for configuration in sweep.configurations:
                run: Run = {"name": configuration.name, "settings": configuration.settings, "reason": None}
                document["runs"].append(run)
                measure(configuration, sweep, run, bar, command)
            document["complete"] = True
        except INTERRUPTS:
            pass
        finally:
            document["runs"] = [summarize_run(run, sweep.price) for run in document["runs"]]
            document["machine"]["others_cpu"] = others.share()
    return document


def measure(configuration: Configuration, sweep: Sweep, run: Run, bar: BenchProgress, command: Command) -> None:
    """Fill in one run, as far as it comes."""
    run["reason"] = missing_settings(configuration)
    job = replace(sweep.job, settings=configuration.settings)
    with _compiler_caches() as caches:
        for temperature, start_only in (("cold", True), ("warm", False)):
            if run["reason"] is None and (sweep.cold or not start_only):
                bar.describe(f"{configuration.name}: {temperature} start")
                _follow(replace(job, start_only=start_only), run, temperature, bar, command, caches)
                bar.advance()


def _follow(
    job: TrialConfig, run: Run, temperature: str, bar: BenchProgress, command: Command, caches: dict[str, str]
) -> None:
    with tempfile.TemporaryFile() as complaints, _child(command(), job, complaints, caches) as child:
        assert child.stdout is not None
        for line in child.stdout:
            _take(json.loads(line), run, temperature, bar)
        if child.wait() != 0 and run["reason"] is None:
            run["reason"] = f"its process ended with {_ending(child.returncode)}{_last_line(complaints)}"


def _take(told: dict[str, Any], run: Run, temperature: str, bar: BenchProgress) -> None:
    """One line of a trial."""
    if "refused" in told:
        run["reason"] = _refusal(told["refused"])
    if "failed" in told:
        run["reason"] = told["failed"]
    if "start" in told:
        run.setdefault("startup", {"cold": None, "warm": None})[temperature] = told["start"]
    for name in ("memory", "engine"):
        if name in told:
            run[name] = told[name]
    if "peak" in told:
        run["memory"]["peak"] = told["peak"]
    if "round" in told:
        run.setdefault("rounds", []).append(told["round"])
        bar.describe(f"{run['name']}: {told['round']['voices']} at a time")
    if "edge" in told:
        run.setdefault("edges", []).append(told["edge"])
    bar.advance(told.get("done", 0))


def _refusal(told: dict[str, str]) -> str:
    """Why this configuration cannot be had; what is wrong with the model is wrong with all of them, and raised."""
    kind = getattr(errors, told["error"], ShoalError)
    if issubclass(kind, ModelNotFound | CheckpointError | VoiceNotFound):
        raise kind(told["message"])
    return told["message"]


def summarize_run(run: Run, price: float | None) -> Run:
    """A run with its figures: what was measured stays beside them, one entry per request."""
    rounds = run.pop("rounds", [])
    voices = list(dict.fromkeys(each["voices"] for each in rounds))
    run["batches"] = [figures(n, [each for each in rounds if each["voices"] == n], price) for n in voices]
    run.setdefault("edges", [])
    return run


def figures(voices: int, rounds: list[dict[str, Any]], price: float | None) -> dict[str, Any]:
    """One batch size over all of its rounds."""
    requests = [request for each in rounds for request in each["requests"]]
    good = [request for request in requests if request["error"] is None]
    heard = [request for request in good if request["audio_seconds"]]  # a text may end before its first frame
    seconds = sum(each["seconds"] for each in rounds)
    audio = sum(request["audio_seconds"] for request in good)
    pace = audio / seconds
    return {
        "voices": voices,
        "seconds": seconds,
        "audio_seconds": audio,
        "frames": sum(request["frames"] for request in good),
        "errors": len(requests) - len(good),
        "rtf": seconds / audio if audio else None,
        "frames_per_second": sum(request["frames"] for request in good) / seconds,
        "audio_per_second": pace,
        "audio_hours_per_hour": pace,
        "cpu_per_audio_second": sum(each["cpu_seconds"] for each in rounds) / audio if audio else None,
        "cost_per_audio_hour": price / pace if price is not None and pace else None,
        "latency": summarize(request["seconds"] for request in good),
        "first_audio": summarize(request["first_audio"] for request in heard),
        "request_rtf": summarize(request["seconds"] / request["audio_seconds"] for request in heard),
        "rounds": [
            {
                "seconds": each["seconds"],
                "cpu_seconds": each["cpu_seconds"],
                "audio_seconds": sum(request["audio_seconds"] for request in each["requests"] if not request["error"]),
            }
            for each in rounds
        ],
        "requests": requests,
    }


@contextmanager
def _child(command: list[str], job: TrialConfig, complaints: IO[bytes], caches: dict[str, str]) -> Iterator[Child]:
    """In a session of its own: an interrupt is for us, and we say when it ends."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
        text=True,
        env=os.environ | caches,
        start_new_session=True,
    )
    try:
        assert child.stdin is not None
        child.stdin.write(json.dumps(asdict(job)))
        child.stdin.close()
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


@contextmanager
def _compiler_caches() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        yield {name: str(Path(folder) / name.lower()) for name in CACHES}


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_line(complaints: IO[bytes]) -> str:
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""


def _total(sweep: Sweep) -> int:
    job = sweep.job
    each = 1 + sweep.cold + len(job.voices) * (job.warm_up + job.samples) + 2 * job.edges
    return len(sweep.configurations) * each


def machine_of(device: str) -> dict[str, Any]:
    import torch

    from shoal.engine.load import choose_device
    from shoal.tools.bench.machine import machine

    return dict(machine(torch.device(choose_device(device))))


def _settings(sweep: Sweep) -> dict[str, Any]:
    """As asked for; a configuration's own settings stand with its run."""
    job = {name: value for name, value in asdict(sweep.job).items() if name not in ("settings", "start_only")}
    return {
        **job,
        "voices": list(sweep.job.voices),
        "cold": sweep.cold,
        "price": sweep.price,
        "currency": sweep.currency,
    }


def require_figures(document: Document) -> None:
    """Raises GenerationFailed when nothing at all could be measured, or nobody heard anything."""
    batches = [batch for run in document["runs"] for batch in run["batches"]]
    if document["complete"] and not any(batch["audio_seconds"] for batch in batches):
        reasons = [f"{run['name']}: {run['reason']}" for run in document["runs"] if run["reason"]]
        errors = [request["error"] for batch in batches for request in batch["requests"] if request["error"]]
        raise GenerationFailed("nothing could be measured. " + "; ".join(reasons + errors[:1]))
