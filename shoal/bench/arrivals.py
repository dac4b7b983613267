"""Requests that come at random moments, as the public does: until their first audio, and whether a player would wait.

Everything is in one process; `shoal load` asks the same of a server.
"""

import time
from typing import Any

import numpy as np

from shoal.bench.spread import spread
from shoal.engine.core import EngineCore
from shoal.engine.utterance import Event, Utterance
from shoal.errors import GenerationFailed


class Listener:
    """Somebody who plays what has come as soon as it comes, with nothing in store."""

    def __init__(self, asked: float, sample_rate: int) -> None:
        self.asked, self._rate = asked, sample_rate
        self.first: float | None = None
        self.chunks = self.late = 0
        self._seconds = 0.0

    def hear(self, samples: int, now: float) -> None:
        if self.first is None:
            self.first = now
        elif samples:
            self.chunks += 1
            self.late += now - self.first > self._seconds
        self._seconds += samples / self._rate


def measure_arrivals(core: EngineCore, utterances: list[Utterance], rate: float, seed: int = 0) -> dict[str, Any]:
    """Speak utterances that come so many per second on average (Poisson). Waiting for a place counts."""
    moments = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(utterances)))
    began, listeners, coming = time.perf_counter(), {}, list(zip(moments.tolist(), utterances, strict=True))
    sample_rate = core.checkpoint.codec.config.sample_rate
    while coming or not core.idle:
        now = time.perf_counter() - began
        while coming and coming[0][0] <= now:
            moment, utterance = coming.pop(0)
            listeners[utterance.id] = Listener(moment, sample_rate)
            core.add(utterance)
        if core.idle:
            time.sleep(max(0.0, coming[0][0] - now))
        for event in core.step():
            listeners[event.utterance.id].hear(_samples(event), time.perf_counter() - began)
    heard = listeners.values()
    return {
        "rate": rate,
        "requests": len(utterances),
        "seconds": time.perf_counter() - began,
        "first_audio": spread(each.first - each.asked for each in heard if each.first is not None),
        "chunks": sum(each.chunks for each in heard),
        "late_chunks": sum(each.late for each in heard),
    }


def _samples(event: Event) -> int:
    if event.error is not None or event.chunk is None:
        raise GenerationFailed(f"the benchmark cannot go on: {event.error}") from event.error
    return len(event.chunk.samples)
