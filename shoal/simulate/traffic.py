"""Requests and when they come: from a trace, or drawn."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds from the beginning
    seconds: float  # of speech
    voice: str | None = None


@dataclass(frozen=True)
class Pattern:
    """Poisson arrivals whose rate swings around its mean, of voices of which few are asked for often."""

    rate: float  # requests a second, on average
    seconds: float
    speech_seconds: float = 6.0  # on average
    voices: int = 100
    swing: float = 0.0  # 0.5: between half and one and a half times the mean, once up and down
    seed: int = 0

    def arrivals(self) -> list[Arrival]:
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


def part_of(arrivals: list[Arrival], cells: int) -> list[Arrival]:
    """What one of so many equal cells gets of the traffic."""
    return arrivals[::cells]


def read_trace(path: Path) -> list[Arrival]:
    """One JSON object per line: `{"at": 1.5, "seconds": 4.2, "voice": "narrator"}`. Raises InvalidRequest."""
    try:
        with path.open(encoding="utf-8") as file:
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
        if arrival.at >= 0 and arrival.seconds > 0:
            return arrival
    except (ValueError, TypeError):
        pass
    raise InvalidRequest(f'line {number} of the trace is not {{"at": seconds, "seconds": of speech, "voice": name}}')
