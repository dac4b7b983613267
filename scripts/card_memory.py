"""Run an engine with the memory of a smaller card and measure its weights, capacity and speed.

    python -m scripts.card_memory DIRECTORY --gigabytes 6,8,12 --json cards.json

For every size this process holds the rest of the GPU's memory, so that a child process finds a card of that size;
`gpu_memory` is nine tenths of it, as by default. DIRECTORY is a checkpoint (`shoal random s2-pro DIRECTORY` writes one
with random weights): the weights of a directory are quantized while they are read, those of `random:` afterwards.
Prints one line of JSON per size. Needs a GPU with more free memory than the largest size.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.many_voices import write

Figures = dict[str, Any]

SHARE = 0.9
TOKENS = 1024  # tokens per voice: about 47 s of reference and speech


def run_engine(model: str, device: str, gigabytes: float) -> Figures:
    """Load a model within the memory of a card and measure one voice and all slots. Errors of Shoal are results too."""
    import torch

    import shoal
    from shoal.config import EngineConfig
    from shoal.errors import ShoalError

    began, on_gpu = time.perf_counter(), device.startswith("cuda")
    config = EngineConfig(guard=False, gpu_memory=f"{SHARE * gigabytes:.2f}GB")
    free = torch.cuda.mem_get_info()[0] if on_gpu else 0
    try:
        with shoal.load(model, device=device, config=config) as engine:
            core = engine.service.core
            core.warm_up()
            figures = {"start": time.perf_counter() - began, **described(core), **speeds(core, quick=not on_gpu)}
            used = free - torch.cuda.mem_get_info()[0] if on_gpu else 0
            return figures | {"free_before": free, "used": used}
    except ShoalError as problem:
        return {"free_before": free, "error": f"{type(problem).__name__}: {problem}"}


def described(core: Any) -> Figures:
    """Return the weights that were chosen, the backends and the capacity of an engine."""
    from shoal.quantize.apply import modes_of
    from shoal.tools.bench.memory import MemoryGauge, memory_parts

    checkpoint, tokens = core.checkpoint, core.pool.count * core.config.block_size
    return {
        "weights": str(modes_of(checkpoint.model, checkpoint.codec)),
        "backends": [core.runner.backend, core.audio_decoder.backend],
        "slots": core.config.slots,
        "voices_in_memory": tokens // TOKENS,
        "memory": memory_parts(core) | {"peak": MemoryGauge(checkpoint.model.device).peak()},
    }


def speeds(core: Any, *, quick: bool) -> Figures:
    """Return step times, and throughput and first audio of one voice and of all slots."""
    from shoal.tools.bench.engine import LONG, QUICK, measure_throughput
    from shoal.tools.bench.profile import step_seconds

    sizes = sorted({1, core.config.slots})
    runs = []
    for voices in sizes:
        measure_throughput(core, "continuous", voices, QUICK)  # warm-up
        figures = measure_throughput(core, "continuous", voices, QUICK if quick else LONG).figures
        runs.append({name: figures[name] for name in ("voices", "rtf", "audio_per_second", "first_audio")})
    preempted = core.scheduler.stats.preempted
    return {"runs": runs, "preempted": preempted, "step_seconds": {size: step_seconds(core, size) for size in sizes}}


def hold_all_but(gigabytes: float) -> Any:
    """Return a tensor that leaves `gigabytes` of the GPU free. Raises SystemExit if there is less."""
    import torch

    torch.cuda.empty_cache()
    rest = torch.cuda.mem_get_info()[0] - int(gigabytes * 1e9)
    if rest < 0:
        raise SystemExit(f"this GPU has less than {gigabytes} GB free")
    return torch.empty(rest, dtype=torch.uint8, device="cuda")


def measure(model: str, device: str, gigabytes: float) -> Figures:
    """Run an engine in its own process beside the memory that this one holds."""
    held = hold_all_but(gigabytes) if device.startswith("cuda") else None
    command = [sys.executable, "-m", "scripts.card_memory", model, "--device", device, "--child", str(gigabytes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    del held
    lines = done.stdout.splitlines()
    found: Figures = json.loads(lines[-1]) if lines else {"error": f"exit code {done.returncode}"}
    return {"model": Path(model).name, "gigabytes": gigabytes, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="DIRECTORY", help="checkpoint directories")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gigabytes", default="6,8,12", help="sizes of the card, separated by commas")
    parser.add_argument("--json", type=Path, help="file for the results; written after each size")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(run_engine(given.models[0], given.device, given.child)))
        return
    results: Figures = {"runs": []}
    for model in given.models:
        for gigabytes in map(float, given.gigabytes.split(",")):
            results["runs"].append(measure(model, given.device, gigabytes))
            print(json.dumps(results["runs"][-1]), flush=True)
            write(given.json, results)


if __name__ == "__main__":
    main()
