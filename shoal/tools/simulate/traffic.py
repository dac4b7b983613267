"""Traffic of the simulation: arrivals from a trace or random."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import InvalidRequest

MAX_REQUESTS = 1_000_000  # per run; simulating them takes more than a quarter of an hour


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at: float  # seconds from the start
    seconds: float  # seconds of speech to generate
    voice: str | None = None


@dataclass(frozen=True)
class TrafficPattern:
    """Poisson arrivals with a sinusoidal rate and Zipf-distributed voices."""

    rate: float  # mean requests per second
    seconds: float  # duration
    speech_seconds: float = 6.0  # mean seconds of speech per request
    voices: int = 100
    swing: float = 0.0  # amplitude of the rate: 0.5 swings between 0.5 and 1.5 times the mean, in one period
    seed: int = 0

    def for_cell(self, cells: int) -> "TrafficPattern":
        """Return the traffic of one of `cells` equal cells: a random sample of a Poisson process is Poisson as well."""
        return replace(self, rate=self.rate / cells)

    def arrivals(self) -> list[Arrival]:
        """Generate the arrivals, reproducibly. Raises InvalidRequest if there are too many to simulate."""
        self._check_count()
        rng = np.random.default_rng(self.seed)
        peak = self.rate * (1 + self.swing)
        count = rng.poisson(peak * self.seconds)
        times = np.sort(rng.uniform(0, self.seconds, count))
        # Thinning of a process at the peak rate gives the varying rate.
        wave = 1 + self.swing * np.sin(2 * math.pi * times / self.seconds)
        times = times[rng.uniform(0, 1, count) < self.rate * wave / peak]
        # Log-normal lengths with sigma 0.5; the shift keeps the mean at `speech_seconds`.
        lengths = rng.lognormal(math.log(self.speech_seconds) - 0.125, 0.5, len(times))
        popularity = 1 / np.arange(1, self.voices + 1)
        chosen = rng.choice(self.voices, len(times), p=popularity / popularity.sum())
        rows = zip(times.tolist(), lengths.tolist(), chosen.tolist(), strict=True)
        return [Arrival(at, seconds, f"voice-{voice}") for at, seconds, voice in rows]

    def _check_count(self) -> None:
        expected = self.rate * self.seconds
        if not expected <= MAX_REQUESTS:  # also true for NaN
            raise InvalidRequest(
                f"the traffic has {expected:,.0f} requests; at most {MAX_REQUESTS:,} can be simulated: "
                "lower --rate or --seconds, or raise --cells: only one cell is simulated"
            )


def sample_cell(arrivals: list[Arrival], cells: int, seed: int) -> list[Arrival]:
    """Return the arrivals of one of `cells` equal cells, each request being assigned to a random cell.

    Taking every n-th request instead would make the arrivals more even and hide queueing.
    """
    cell = np.random.default_rng(seed).integers(cells, size=len(arrivals))
    return [arrival for arrival, where in zip(arrivals, cell.tolist(), strict=True) if where == 0]


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace with one JSON object per line: `{"at": 1.5, "seconds": 4.2, "voice": "narrator"}`.

    Returns the arrivals sorted by time. Raises InvalidRequest for an unreadable or invalid file.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            arrivals = [_arrival(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidRequest(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None
    if not arrivals:
        raise InvalidRequest(f"{path} is empty: it needs one request per line")
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _arrival(number: int, line: str) -> Arrival:
    try:
        content: dict[str, Any] = json.loads(line)
        arrival = Arrival(**content)
        if 0 <= arrival.at < math.inf and 0 < arrival.seconds < math.inf and isinstance(arrival.voice, str | None):
            return arrival
    except (ValueError, TypeError):
        pass
    raise InvalidRequest(
        f"line {number} of the trace is invalid: expected "
        '{"at": seconds, "seconds": seconds of speech, "voice": name or null}'
    )
