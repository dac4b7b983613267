"""Requests that come at random moments, as the public does: until their first audio, and whether a player would wait.

Everything is in one process; `shoal load` asks the same of a server.
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
    """Speak utterances that come so many per second on average (Poisson). Waiting for a place counts."""
    moments = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(utterances)))
    began, asked, coming = time.perf_counter(), {}, list(zip(moments.tolist(), utterances, strict=True))
    heard: dict[int, list[tuple[float, float]]] = {}
    while coming or not core.idle:
        now = time.perf_counter() - began
        while coming and coming[0][0] <= now:
            moment, utterance = coming.pop(0)
            asked[utterance.id], heard[utterance.id] = moment, []
            core.add(utterance)
        if core.idle:
            time.sleep(max(0.0, coming[0][0] - now))
        for event in core.step():
            heard[event.utterance.id].append((time.perf_counter() - began, _seconds(event)))
    return {
        "rate": rate,
        "requests": len(utterances),
        "seconds": time.perf_counter() - began,
        "first_audio": summarize(pieces[0][0] - asked[id] for id, pieces in heard.items()),
        "starved": sum(stalled_seconds(pieces, buffer=0.0) > 0 for pieces in heard.values()),
    }


def _seconds(event: Event) -> float:
    if event.error is not None or event.chunk is None:
        raise GenerationFailed(f"the benchmark cannot go on: {event.error}") from event.error
    return event.chunk.seconds
