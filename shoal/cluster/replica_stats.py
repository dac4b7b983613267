"""Request counts, latencies and recent voices of one replica."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from statistics import quantiles

from shoal.cluster.routing import voice_key
from shoal.speech import SpeechRequest

MAX_LATENCIES = 512
MAX_VOICES = 64


class RequestOutcome(Enum):
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"  # the client disconnected before the end


@dataclass(slots=True)
class ReplicaStats:
    """Statistics of a replica since it started. Not thread-safe."""

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    first_audio: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))
    whole: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))
    voices: OrderedDict[str, None] = field(default_factory=OrderedDict)  # least recently used first

    def start_request(self) -> None:
        self.requests += 1
        self.in_flight += 1

    def record_first_audio(self, request: SpeechRequest, seconds: float) -> None:
        """Record the time to first audio of a request, and its voice as cached here."""
        self.first_audio.append(seconds)
        key = voice_key(request)
        if key is not None:
            self.voices.pop(key, None)
            self.voices[key] = None
        while len(self.voices) > MAX_VOICES:
            self.voices.popitem(last=False)

    def end_request(self, seconds: float, outcome: RequestOutcome) -> None:
        self.in_flight -= 1
        self.failed += outcome is RequestOutcome.FAILED
        self.cancelled += outcome is RequestOutcome.CANCELLED
        if outcome is RequestOutcome.COMPLETED:
            self.whole.append(seconds)


def percentiles(seconds: deque[float]) -> dict[str, float] | None:
    """Return the 50th and 95th percentile of the latest values; None without values."""
    if not seconds:
        return None
    if len(seconds) == 1:
        return {"p50": round(seconds[0], 4), "p95": round(seconds[0], 4)}
    cuts = quantiles(seconds, n=20, method="inclusive")
    return {"p50": round(cuts[9], 4), "p95": round(cuts[18], 4)}
