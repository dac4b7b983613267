"""Compare several engine processes on one device with one process, with the same total number of voices.

    python -m scripts.engines_per_gpu --model random:s1-mini --engines 1,2,3 --voices 64 --json engines.json

Every engine loads its own copy of the weights, gets its share of the voices and runs a closed loop. All start
together. The processes share the device by time slices, or through MPS if its daemon runs. Prints one line of JSON per
number of engines: throughput of all, time to first audio, and the device memory that each process reserved.
"""

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shoal.tools.bench.percentiles import summarize

Figures = dict[str, Any]


def run_engine(model: str, device: str, voices: int, *, quick: bool) -> None:
    """Load an engine, report that it is ready, wait for a line on standard input, measure, and print the figures."""
    from shoal.tools.bench.engine import LONG, QUICK, load_core, measure_throughput
    from shoal.tools.bench.memory import MemoryGauge

    core = load_core(model, device, voices)
    measure_throughput(core, "continuous", voices, QUICK)  # warm-up
    print(json.dumps({"ready": core.runner.backend}), flush=True)
    sys.stdin.readline()
    measured = measure_throughput(core, "continuous", voices, QUICK if quick else LONG)
    memory = MemoryGauge(core.checkpoint.model.device).peak()
    fields = {name: getattr(measured, name) for name in ("audio_seconds", "seconds", "utterances", "waits")}
    print(json.dumps({**fields, "memory": memory}), flush=True)


def measure(model: str, device: str, engines: int, voices: int, *, quick: bool = False) -> Figures:
    """Run `engines` processes with their shares of the voices at the same time and return their figures together."""
    command = [sys.executable, "-m", "scripts.engines_per_gpu", "--child", "--model", model, "--device", device]
    command += ["--quick"] if quick else []
    shares = [voices // engines + (number < voices % engines) for number in range(engines)]
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, "--voices", str(share)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for share in shares
        ]
        stack.callback(lambda: [child.kill() for child in children])
        backends = [_read(child)["ready"] for child in children]
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        found = [_read(child) for child in children]
    return {"engines": engines, "voices": voices, "backends": backends, **together(found)}


def together(found: list[Figures]) -> Figures:
    """Return the figures of engines that ran at the same time: the slowest one ends the measurement."""
    seconds = max(each["seconds"] for each in found)
    return {
        "audio_per_second": sum(each["audio_seconds"] for each in found) / seconds,
        "requests_per_second": sum(each["utterances"] for each in found) / seconds,
        "first_audio": summarize(wait for each in found for wait in each["waits"]),
        "memory": [each["memory"] for each in found],
    }


def _read(child: "subprocess.Popen[str]") -> Figures:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"an engine process ended with exit code {child.wait()}")
    figures: Figures = json.loads(line)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:s1-mini")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engines", default="1,2,3", help="numbers of processes, separated by commas")
    parser.add_argument("--voices", type=int, default=64, help="concurrent requests of all processes together")
    parser.add_argument("--quick", action="store_true", help="generate a few frames per request")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        run_engine(given.model, given.device, given.voices, quick=given.quick)
        return
    results = []
    for engines in map(int, given.engines.split(",")):
        results.append(measure(given.model, given.device, engines, given.voices, quick=given.quick))
        print(json.dumps(results[-1]), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
