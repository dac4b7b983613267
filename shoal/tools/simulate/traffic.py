"""Requests and when they come: from a trace, or drawn."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import InvalidRequest

MAX_REQUESTS = 1_000_000  # of one run: they take a good quarter of an hour


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds from the beginning
    seconds: float  # of speech
    voice: str | None = None


@dataclass(frozen=True)
class TrafficPattern:
    """Poisson arrivals whose rate swings around its mean, of voices of which few are asked for often."""

    rate: float  # requests a second, on average
    seconds: float
    speech_seconds: float = 6.0  # on average
    voices: int = 100
    swing: float = 0.0  # 0.5: between half and one and a half times the mean, once up and down
    seed: int = 0

    def for_cell(self, cells: int) -> "TrafficPattern":
        """What one of so many equal cells gets: a random part of Poisson arrivals is Poisson too, of a lower rate."""
        return replace(self, rate=self.rate / cells)

    def arrivals(self) -> list[Arrival]:
        """The same for the same pattern. Raises InvalidRequest when they are too many to simulate."""
        self._check_count()
        draw = np.random.default_rng(self.seed)
        peak = self.rate * (1 + self.swing)
        count = draw.poisson(peak * self.seconds)
        times = np.sort(draw.uniform(0, self.seconds, count))
        # Thinned to the rate of the moment.
        wave = 1 + self.swing * np.sin(2 * math.pi * times / self.seconds)
        times = times[draw.uniform(0, 1, count) < self.rate * wave / peak]
        # Lengths of sentences are spread about as wide as they are long.
        lengths = draw.lognormal(math.log(self.speech_seconds) - 0.125, 0.5, len(times))
        popularity = 1 / np.arange(1, self.voices + 1)
        chosen = draw.choice(self.voices, len(times), p=popularity / popularity.sum())
        rows = zip(times.tolist(), lengths.tolist(), chosen.tolist(), strict=True)
        return [Arrival(at, seconds, f"voice-{voice}") for at, seconds, voice in rows]

    def _check_count(self) -> None:
        expected = self.rate * self.seconds
        if not expected <= MAX_REQUESTS:  # nor is what is not a number
            raise InvalidRequest(
                f"that is {expected:,.0f} requests, and {MAX_REQUESTS:,} can be simulated: "
                "lower --rate or --seconds, or raise --cells, of which one is simulated"
            )


def sample_cell(arrivals: list[Arrival], cells: int, seed: int) -> list[Arrival]:
    """What one of so many equal cells gets of the traffic, when every request goes to any of them.

    Every so many-th request instead would come far more evenly, and queues that are there would not be seen.
    """
    cell = np.random.default_rng(seed).integers(cells, size=len(arrivals))
    return [arrival for arrival, where in zip(arrivals, cell.tolist(), strict=True) if where == 0]


def read_trace(path: Path) -> list[Arrival]:
    """One JSON object per line: `{"at": 1.5, "seconds": 4.2, "voice": "narrator"}`. Raises InvalidRequest."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            arrivals = [_arrival(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidRequest(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None
    if not arrivals:
        raise InvalidRequest(f"{path} is empty: give it one request per line")
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _arrival(number: int, line: str) -> Arrival:
    try:
        content: dict[str, Any] = json.loads(line)
        arrival = Arrival(**content)
        if 0 <= arrival.at < math.inf and 0 < arrival.seconds < math.inf and isinstance(arrival.voice, str | None):
            return arrival
    except (ValueError, TypeError):
        pass
    raise InvalidRequest(f'line {number} of the trace is not {{"at": seconds, "seconds": of speech, "voice": name}}')
