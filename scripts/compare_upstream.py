"""Compare one request with the code of a fish-speech checkout: upstream eager, upstream compiled, and Shoal.

    python -m scripts.compare_upstream CHECKOUT --python CHECKOUT/.venv/bin/python --json compared.json

They run one after the other, each in its own process, on the same device, with the same weights, prompt and number of
frames. Upstream runs in its own environment (`--python`). Shoal starts twice: the first time it compiles kernels that
are not in the cache yet. Without `--model` random weights of S1-mini's size are saved and used; they sound like noise
and take the same time. Upstream decodes a request as a whole, so its first audio comes at the end. Prints a table in
Markdown with commit and date.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Figures = dict[str, Any]

COLUMNS = ("", "frames/s, model", "frames/s, whole", "RTF", "first audio", "load", "first request", "memory")
MODES = {"eager": "upstream, eager", "compile": "upstream, compiled"}


def run_shoal(plan: Path, model: str, device: str, frames: int) -> Figures:
    """Run the request with Shoal's engine and write the plan for upstream."""
    from shoal.checkpoint.resolve import resolve_model
    from shoal.config import EngineConfig
    from shoal.engine.load import build_core, choose_device, choose_dtype
    from shoal.engine.preprocess import build_turns
    from shoal.tools.bench.engine import TEXT
    from shoal.tools.bench.memory import MemoryGauge

    began, where = time.perf_counter(), choose_device(device)
    checkpoint = resolve_model(model, dtype=choose_dtype(None, where), device=where)
    # The guard would retry noise with another seed, which changes the amount of work.
    core = build_core(checkpoint, EngineConfig(slots=1, guard=False))
    loaded = time.perf_counter()
    core.warm_up()
    turns = build_turns(TEXT, None, checkpoint)
    write_plan(plan, model, where, frames, turns[0].prompt.T.tolist(), checkpoint.model.config)
    speak(core, turns, 4)
    warm = time.perf_counter()
    core.pool.clear_cache()
    return {
        "start": loaded - began,
        "warm_up": warm - loaded,
        "frames": frames,
        **speak(core, turns, frames),
        "memory": MemoryGauge(checkpoint.model.device).peak() if where.startswith("cuda") else None,
        "frame_rate": checkpoint.codec.config.frame_rate,
        "backends": [core.runner.backend, core.audio_decoder.backend],
    }


def speak(core: Any, turns: list[Any], frames: int) -> Figures:
    """Run one request to its end; return its seconds and those to its first audio."""
    from shoal.engine.utterance import Utterance
    from shoal.speech import SamplingParams

    began, first = time.perf_counter(), None
    core.add(Utterance(frames, turns, SamplingParams(seed=0, max_frames=frames)))
    while not core.idle:
        for event in core.step():
            first = first or time.perf_counter()
            if event.error is not None:
                raise event.error
    done = time.perf_counter()
    return {"seconds": done - began, "first_audio": (first or done) - began}


def write_plan(plan: Path, model: str, device: str, frames: int, prompt: list[list[int]], config: Any) -> None:
    """Write what upstream needs to do the same work."""
    ids = [config.semantic_begin_id, config.semantic_end_id]
    fields = {"stop_id": config.stop_id, "semantic_ids": ids, "codebook_size": config.codebook_size}
    plan.write_text(json.dumps({"model": model, "device": device, "frames": frames, "prompt": prompt, **fields}))


def run_upstream(checkout: Path, python: str, plan: Path, mode: str) -> Figures:
    """Run the request with upstream's code. Raises SystemExit with the end of its output if that fails."""
    command = [python, str(Path(__file__).parent / "upstream_request.py"), str(plan), mode]
    paths = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"upstream ({mode}) failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    seconds = figures["model_seconds"] + figures["codec_seconds"]
    return figures | {"seconds": seconds, "first_audio": seconds}


def row(name: str, figures: Figures, frame_rate: float) -> list[str]:
    """Return one line of the table."""
    frames, seconds, memory = figures["frames"], figures["seconds"], figures["memory"]
    model = figures.get("model_seconds")
    return [
        name,
        "" if model is None else f"{frames / model:,.0f}",
        f"{frames / seconds:,.0f}",
        f"{seconds / (frames / frame_rate):.4f}",
        f"{figures['first_audio'] * 1e3:,.1f} ms",
        f"{figures['start']:.1f} s",
        f"{figures['warm_up']:.1f} s",
        "" if memory is None else f"{memory / 1e9:.2f} GB",
    ]


def table(results: dict[str, Figures]) -> str:
    rate = results["Shoal"]["frame_rate"]
    rows = [row(name, figures, rate) for name, figures in results.items()]
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def commit_of(checkout: Path) -> str:
    """Return the commit of the checkout. Raises SystemExit if the directory is no checkout of fish-speech."""
    if not (checkout / "fish_speech" / "models" / "text2semantic" / "inference.py").is_file():
        raise SystemExit(f"{checkout} is not a checkout of fish-speech: give the directory that holds fish_speech/")
    if not (checkout / ".git").exists():
        return "of an unknown commit"
    command = ("git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def compare(given: argparse.Namespace, folder: Path, document: Figures) -> None:
    """Run Shoal and upstream, and add each result to the document, which is written after each run."""
    model, plan, results = given.model, folder / "plan.json", document["results"]
    if model is None:
        model = str(folder / "model")
        subprocess.run([sys.executable, "-m", "shoal.cli", "random", given.size, model], check=True, stdout=sys.stderr)
    own = [sys.executable, "-m", "scripts.compare_upstream", str(given.checkout), "--shoal", str(plan)]
    own += ["--model", model, "--device", given.device, "--frames", str(given.frames)]
    for name in ("Shoal, kernels not compiled yet", "Shoal"):
        done = subprocess.run(own, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        write(given.json, document)
    for mode in given.modes.split(","):
        results[MODES[mode]] = run_upstream(given.checkout.resolve(), given.python, plan, mode)
        write(given.json, document)


def write(path: Path | None, document: Figures) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="directory of a fish-speech checkout")
    parser.add_argument("--python", default=sys.executable, help="interpreter of upstream's environment")
    parser.add_argument("--model", help="checkpoint directory; default: random weights")
    parser.add_argument("--size", default="s1-mini", help="size of the random weights")
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--modes", default="eager,compile", help="how upstream runs: eager, compile or both")
    parser.add_argument("--json", type=Path, help="file for all figures; written after each run")
    parser.add_argument("--shoal", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.shoal is not None:
        print(json.dumps(run_shoal(given.shoal, given.model, given.device, given.frames)))
        return
    document = {"commit": commit_of(given.checkout), "date": datetime.now(UTC).date().isoformat(), "results": {}}
    with tempfile.TemporaryDirectory(prefix="shoal-compare-") as folder:
        compare(given, Path(folder), document)
    title = f"fish-speech {document['commit']}, {document['date']}, {given.frames} frames, {given.device}"
    print(f"{title}\n\n{table(document['results'])}")


if __name__ == "__main__":
    main()
