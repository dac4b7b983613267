"""Open-loop benchmark of the engine in this process: Poisson arrivals, time to first audio, playback stalls.

`shoal load` measures the same on a server.
"""

import time
from typing import Any

import numpy as np

from shoal.engine.core import EngineCore
from shoal.engine.utterance import Event, Utterance
from shoal.errors import GenerationFailed
from shoal.tools.bench.load.playback import stalled_seconds
from shoal.tools.bench.percentiles import summarize


def measure_arrivals(core: EngineCore, utterances: list[Utterance], rate: float, seed: int = 0) -> dict[str, Any]:
    """Run utterances that arrive at `rate` per second on average (Poisson). Time in the queue counts as latency."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(utterances)))
    started, arrived, pending = time.perf_counter(), {}, list(zip(times.tolist(), utterances, strict=True))
    chunks: dict[int, list[tuple[float, float]]] = {}  # (arrival time, seconds of audio) by utterance
    while pending or not core.idle:
        now = time.perf_counter() - started
        while pending and pending[0][0] <= now:
            at, utterance = pending.pop(0)
            arrived[utterance.id], chunks[utterance.id] = at, []
            core.add(utterance)
        if core.idle:
            time.sleep(max(0.0, pending[0][0] - now))
        for event in core.step():
            chunks[event.utterance.id].append((time.perf_counter() - started, _seconds(event)))
    return {
        "rate": rate,
        "requests": len(utterances),
        "seconds": time.perf_counter() - started,
        "first_audio": summarize(received[0][0] - arrived[id] for id, received in chunks.items()),
        "starved": sum(stalled_seconds(received, buffer=0.0) > 0 for received in chunks.values()),
    }


def _seconds(event: Event) -> float:
    if event.error is not None or event.chunk is None:
        raise GenerationFailed(f"a request of the benchmark failed: {event.error}") from event.error
    return event.chunk.seconds
