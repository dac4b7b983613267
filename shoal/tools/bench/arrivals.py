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
    usage = KVUsage(core)
    chunks: dict[int, list[tuple[float, float]]] = {}  # (arrival time, seconds of audio) by utterance

    def receive(event: Event) -> None:
        chunks[event.utterance.id].append((time.perf_counter() - started, _seconds(event)))

    while pending or not core.idle:
        now = time.perf_counter() - started
        while pending and pending[0][0] <= now:
            at, utterance = pending.pop(0)
            arrived[utterance.id], chunks[utterance.id] = at, []
            core.add(utterance)
        if core.idle:
            time.sleep(max(0.0, pending[0][0] - now))
        events = core.step(receive)
        usage.note()
        for event in events:
            receive(event)
    return {
        "rate": rate,
        "requests": len(utterances),
        "seconds": time.perf_counter() - started,
        "first_audio": summarize(received[0][0] - arrived[id] for id, received in chunks.items()),
        "starved": sum(stalled_seconds(received, buffer=0.0) > 0 for received in chunks.values()),
        "kv": usage.figures(),
    }


class KVUsage:
    """Tokens of KV cache by step: used by the running sequences, held in their blocks, and held by static buffers.

    A static buffer has the length of the model's longest sequence.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core, self._steps = core, 0
        self._sums = dict.fromkeys(("used", "blocks", "static", "running"), 0)

    def note(self) -> None:
        """Count the sequences that are running now."""
        scheduler, longest = self._core.scheduler, self._core.checkpoint.model.config.slow.max_seq_len
        if running := scheduler.running:
            self._steps += 1
            self._sums["used"] += sum(sequence.computed for sequence in running)
            held = {block for sequence in running for block in sequence.blocks}
            self._sums["blocks"] += len(held) * self._core.pool.size
            self._sums["static"] += len(running) * longest
            self._sums["running"] += len(running)

    def figures(self) -> dict[str, float]:
        """Return the means over all steps with running sequences."""
        return {name: total / max(1, self._steps) for name, total in self._sums.items()}


def _seconds(event: Event) -> float:
    if event.error is not None or event.chunk is None:
        raise GenerationFailed(f"a request of the benchmark failed: {event.error}") from event.error
    return event.chunk.seconds
