"""`shoal bench`: the same texts under every configuration, each in its own process, one after the other.

Every configuration is started twice: cold, with empty compiler caches, and warm, with the caches of the cold start.
The warm process is measured.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

# Cache directories of the compilers; pointed at an empty directory for a cold start.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")

Run = dict[str, Any]
Child = subprocess.Popen[str]
Command = Callable[[], list[str]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Configurations to measure, and the price of the machine."""

    job: TrialConfig
    configurations: list[Configuration]
    cold: bool = True
    price: float | None = None  # price of one hour
    currency: str = "USD"


def trial_command() -> list[str]:
    return [sys.executable, "-m", "shoal.tools.bench.trial"]


def run_sweep(sweep: Sweep, *, progress: bool = True, command: Command = trial_command) -> Document:
    """Measure all configurations. An interrupt keeps the finished measurements and leaves `complete` false.

    Raises errors of the model itself. A configuration that is not available becomes a run with a `reason`.
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
    """Measure one configuration and fill in its run as results arrive."""
    run["reason"] = missing_settings(configuration)
    job = replace(sweep.job, settings=configuration.settings)
    with _compiler_caches(empty=sweep.cold) as caches:
        for temperature, start_only in (("cold", True), ("warm", False)):
            if run["reason"] is None and (sweep.cold or not start_only):
                bar.describe(f"{configuration.name}: {temperature} start")
                _follow(replace(job, start_only=start_only), run, temperature, bar, command, caches)
                bar.advance()


def _follow(
    job: TrialConfig, run: Run, temperature: str, bar: BenchProgress, command: Command, caches: dict[str, str]
) -> None:
    with tempfile.TemporaryFile() as stderr, _child(command(), job, stderr, caches) as child:
        assert child.stdout is not None
        for line in child.stdout:
            _take(json.loads(line), run, temperature, bar)
        if child.wait() != 0 and run["reason"] is None:
            run["reason"] = f"its process ended with {_ending(child.returncode)}{_last_line(stderr)}"


def _take(message: dict[str, Any], run: Run, temperature: str, bar: BenchProgress) -> None:
    """Process one message of a trial."""
    if "refused" in message:
        run["reason"] = _refusal(message["refused"])
    if "failed" in message:
        run["reason"] = message["failed"]
    if "start" in message:
        run.setdefault("startup", {"cold": None, "warm": None})[temperature] = message["start"]
    for name in ("memory", "engine"):
        if name in message:
            run[name] = message[name]
    if "peak" in message:
        run["memory"]["peak"] = message["peak"]
    if "round" in message:
        run.setdefault("rounds", []).append(message["round"])
        bar.describe(f"{run['name']}: batch size {message['round']['voices']}")
    if "edge" in message:
        run.setdefault("edges", []).append(message["edge"])
    bar.advance(message.get("done", 0))


def _refusal(message: dict[str, str]) -> str:
    """Return why this configuration is not available; raise errors of the model, which concern all configurations."""
    kind = getattr(errors, message["error"], ShoalError)
    if issubclass(kind, ModelNotFound | CheckpointError | VoiceNotFound):
        raise kind(message["message"])
    return message["message"]


def summarize_run(run: Run, price: float | None) -> Run:
    """Add the figures of every batch size to a run; the individual requests stay in it."""
    rounds = run.pop("rounds", [])
    voices = list(dict.fromkeys(each["voices"] for each in rounds))
    run["batches"] = [figures(n, [each for each in rounds if each["voices"] == n], price) for n in voices]
    run.setdefault("edges", [])
    return run


def figures(voices: int, rounds: list[dict[str, Any]], price: float | None) -> dict[str, Any]:
    """Return the figures of one batch size over all of its rounds."""
    requests = [request for each in rounds for request in each["requests"]]
    good = [request for request in requests if request["error"] is None]
    audible = [request for request in good if request["audio_seconds"]]  # a request may end before its first frame
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
        "requests_per_second": len(good) / seconds,
        "cpu_per_audio_second": sum(each["cpu_seconds"] for each in rounds) / audio if audio else None,
        "cost_per_audio_hour": price / pace if price is not None and pace else None,
        "latency": summarize(request["seconds"] for request in good),
        "first_audio": summarize(request["first_audio"] for request in audible),
        "request_rtf": summarize(request["seconds"] / request["audio_seconds"] for request in audible),
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
def _child(command: list[str], job: TrialConfig, stderr: IO[bytes], caches: dict[str, str]) -> Iterator[Child]:
    """Run a trial in its own session, so that Ctrl-C reaches only this process, which then kills the child."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | caches,
        start_new_session=True,
    )
    try:
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin:  # a child that died early is reported by its exit status
            child.stdin.write(json.dumps(asdict(job)))
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


@contextmanager
def _compiler_caches(*, empty: bool) -> Iterator[dict[str, str]]:
    """Yield environment variables for empty compiler caches; none without `empty`, to use the user's caches."""
    if not empty:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        yield {name: str(Path(folder) / name.lower()) for name in CACHES}


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_line(stderr: IO[bytes]) -> str:
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").strip().splitlines()
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
    """Return the settings of the document; those of a configuration are stored in its run."""
    job = {name: value for name, value in asdict(sweep.job).items() if name not in ("settings", "start_only")}
    return {
        **job,
        "voices": list(sweep.job.voices),
        "cold": sweep.cold,
        "price": sweep.price,
        "currency": sweep.currency,
    }


def require_figures(document: Document) -> None:
    """Raise GenerationFailed if a complete document contains no audio at all."""
    batches = [batch for run in document["runs"] for batch in run["batches"]]
    if document["complete"] and not any(batch["audio_seconds"] for batch in batches):
        reasons = [f"{run['name']}: {run['reason']}" for run in document["runs"] if run["reason"]]
        errors = [request["error"] for batch in batches for request in batch["requests"] if request["error"]]
        raise GenerationFailed("nothing could be measured: " + "; ".join(reasons + errors[:1]))
