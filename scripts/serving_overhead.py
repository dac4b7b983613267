"""Measure what serving costs beside the model: `shoal serve` and `shoal load` with a device that only waits.

    python -m scripts.serving_overhead --clients 64 --requests 640 --json overhead.json
    python -m scripts.serving_overhead --clients 64 --requests 704 --burst

The engine process runs its scheduler, its request tracker and its pipe as always, but a step is a wait as long as one
of S1-mini on an H200, and the codec returns silence at 44.1 kHz. So requests per second are limited by the processes on
the host, and no GPU is needed. Prints latencies, requests per second, and CPU milliseconds per request of the server
process, of the engine process and of the load generator. Linux only.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from scripts.emulated_device import DEVICES, emulate_device

DEVICE = "s1-mini"
FRAMES = 120  # frames per request: 5.6 s of audio


def serve(port: int, clients: int) -> None:
    """Run the server. Its engine process imports this module under another name, which emulates the device."""
    from shoal.cli.serving.serve import resolve_settings
    from shoal.server.run import serve

    flags = {"model": "random:tiny", "device": "cpu", "port": port, "slots": clients}
    chosen = resolve_settings(flags, None, ["backend=eager", "guard=false", f"max_waiting={8 * clients}"]).settings
    serve(chosen.server(), chosen.source(), chosen.voice_directory())


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a running process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_of(server: int) -> int:
    """Return the process id of the server's engine process."""
    for process in Path("/proc").glob("[0-9]*"):
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        if int(fields[1]) == server and b"spawn_main" in (process / "cmdline").read_bytes():
            return int(process.name)
    raise SystemExit("the server has no engine process")


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=10)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit("the server did not start")


def measure(clients: int, requests: int, port: int, *, burst: bool = False) -> dict[str, Any]:
    """Serve, run a load test, and return its figures and the CPU time of each process."""
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "scripts.serving_overhead", "--serve", "--port", str(port), "--clients", str(clients)]
    )
    try:
        wait_until_ready(server, url)
        processes = {"server": server.pid, "engine": engine_of(server.pid)}
        before = {name: cpu_seconds(process) for name, process in processes.items()}
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "load.json"
            load = [
                sys.executable,
                "-m",
                "shoal.cli",
                "load",
                url,
                "--burst" if burst else "--clients",
                str(clients),
                "--quiet",
            ]
            started = os.times()
            subprocess.run([*load, "--requests", str(requests), "--json", str(report)], check=True)
            ended = os.times()
            stage = json.loads(report.read_text())["runs"][0]["stages"][0]
        spent = {name: cpu_seconds(process) - before[name] for name, process in processes.items()}
        spent["load"] = ended.children_user + ended.children_system - started.children_user - started.children_system
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    figures: dict[str, Any] = {"clients": clients, "requests": stage["requests"], "errors": stage["errors"]}
    figures |= {
        "requests_per_second": round(stage["throughput"], 1),
        "audio_per_second": round(stage["audio_per_second"]),
    }
    for name in ("first_audio", "latency"):
        figures[f"{name}_ms"] = {part: round(stage[name][part] * 1e3, 1) for part in ("p50", "p95", "p99")}
    return figures | {"cpu_ms_per_request": {name: round(each / requests * 1e3, 2) for name, each in spent.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64, help="clients at once, and slots of the engine")
    parser.add_argument("--requests", type=int, default=640)
    parser.add_argument(
        "--burst", action="store_true", help="send as many requests as clients at once, again and again"
    )
    parser.add_argument("--port", type=int, default=8094)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.port, arguments.clients)
        return
    figures = json.dumps(measure(arguments.clients, arguments.requests, arguments.port, burst=arguments.burst))
    print(figures)
    if arguments.json is not None:
        arguments.json.write_text(figures + "\n")


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    emulate_device(DEVICES[DEVICE], FRAMES)
