"""Predict first audio in bursts, throughput and stalls of an engine on an H200, with a device that only waits.

    python -m scripts.emulated_bursts --device s2-pro --voices 16,64
    python -m scripts.emulated_bursts --stagger     # upper bound for `scripts.serving_overhead`: no HTTP

For every number of voices five bursts of requests without a voice, 60 frames each: medians of P50 and P95 of first
audio and of the throughput, and players that stall without a buffer. Then a closed loop, two requests of 200 frames per
client, and random arrivals at 70 % of its throughput. The whole engine runs except model and codec
(scripts/emulated_device.py). `--frame-pause 0` computes prompts and frames in every step. `--stagger` only runs clients
that start one after the other, ten requests of 120 frames each, and prints their throughput while all are live.
"""

import argparse
import time
from statistics import median

import torch

from scripts.emulated_device import DEVICES, emulate_device
from scripts.many_voices import closed_loop, utterance
from shoal.checkpoint.resolve import resolve_model
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.load import build_core
from shoal.engine.scheduling import scheduler
from shoal.tools.bench.arrivals import measure_arrivals
from shoal.tools.bench.load.playback import stalled_seconds

BURSTS, BURST_FRAMES, FRAMES = 5, 60, 200


def emulated_core(device: str, slots: int) -> EngineCore:
    times = DEVICES[device]
    emulate_device(times, FRAMES)
    checkpoint = resolve_model(f"random:{times.size}", dtype=torch.float32, device="cpu", encoder=False)
    config = EngineConfig(slots=slots, guard=False, backend="eager", kv_bytes=2 << 30)
    return build_core(checkpoint, config)


def stalled_players(core: EngineCore, voices: int) -> int:
    """Return how many players of a burst run out of samples, each starting with its first audio."""
    core.pool.clear_cache()
    requests = [utterance(core, number, BURST_FRAMES) for number in range(voices)]
    chunks: dict[int, list[tuple[float, float]]] = {each.id: [] for each in requests}
    for each in requests:
        core.add(each)
    began = time.perf_counter()
    while not core.idle:
        for event in core.step():
            chunks[event.utterance.id].append((time.perf_counter() - began, event.chunk_or_raise().seconds))
    return sum(stalled_seconds(received, buffer=0.0) > 0 for received in chunks.values())


def measure_burst(core: EngineCore, voices: int) -> str:
    runs = [closed_loop(core, voices, BURST_FRAMES, 1)[0] for _ in range(BURSTS)]
    first = [median(run["first_audio"][each] for run in runs) * 1e3 for each in ("p50", "p95")]
    rate = median(run["audio_per_second"] for run in runs)
    return (
        f"{voices} at once: first audio P50 {first[0]:.0f} ms, P95 {first[1]:.0f} ms, {rate:.0f} audio-s/s, "
        f"{stalled_players(core, voices)} stalled"
    )


def measure_clients(core: EngineCore, clients: int, arrivals: int) -> str:
    rate = closed_loop(core, clients, FRAMES, 2)[0]["audio_per_second"]
    requests = [utterance(core, number, FRAMES) for number in range(arrivals)]
    found = measure_arrivals(core, requests, 0.7 * rate * core.checkpoint.codec.config.frame_rate / FRAMES)
    first = [found["first_audio"][each] * 1e3 for each in ("p50", "p95")]
    return (
        f"{clients} clients: {rate:.0f} audio-s/s; {found['rate']:.0f} requests/s at random: "
        f"first audio P50 {first[0]:.0f} ms, P95 {first[1]:.0f} ms, {found['starved']} stalled"
    )


def measure_staggered(core: EngineCore, clients: int) -> str:
    found = closed_loop(core, clients, 120, 10, stagger=True)[0]
    first = [found["first_audio"][each] * 1e3 for each in ("p50", "p95")]
    rate = found["live_audio_per_second"]
    return f"{clients} clients: {rate:.0f} audio-s/s; first audio P50 {first[0]:.0f} ms, P95 {first[1]:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="s1-mini")
    parser.add_argument("--voices", default="16,64", help="requests of a burst, separated by commas")
    parser.add_argument("--clients", type=int, default=64, help="clients of the closed loop")
    parser.add_argument("--arrivals", type=int, default=150, help="requests that arrive at random")
    parser.add_argument("--stagger", action="store_true", help="only clients that start one after the other")
    parser.add_argument(
        "--frame-pause",
        type=float,
        default=scheduler.FRAME_PAUSE,
        help="frames that streams wait while a step computes prompts",
    )
    given = parser.parse_args()
    scheduler.FRAME_PAUSE = given.frame_pause
    if not given.frame_pause:
        scheduler.MAX_PAUSING_PREFILL_SECONDS = 0.0
    sizes = [int(size) for size in given.voices.split(",")]
    core = emulated_core(given.device, max(given.clients, *sizes))
    closed_loop(core, 8, 4, 1)  # warm-up
    if given.stagger:
        print(measure_staggered(core, given.clients))
        return
    for voices in sizes:
        print(measure_burst(core, voices), flush=True)
    print(measure_clients(core, given.clients, given.arrivals))


if __name__ == "__main__":
    main()
