"""What one replica has done, for those who watch it."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from statistics import quantiles

from shoal.cluster.routing import voice_key
from shoal.speech import SpeechRequest

REMEMBERED_SPEECHES = 512
REMEMBERED_VOICES = 64


class RequestOutcome(Enum):
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"  # by the listener, before the end


@dataclass(slots=True)
class ReplicaStats:
    """What one replica has done since it started."""

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    first_audio: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_SPEECHES))
    whole: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_SPEECHES))
    voices: OrderedDict[str, None] = field(default_factory=OrderedDict)  # least recently spoken first

    def start_request(self) -> None:
        self.requests += 1
        self.in_flight += 1

    def record_first_audio(self, request: SpeechRequest, seconds: float) -> None:
        """First audio of a request, so many seconds after it came: its voice is here."""
        self.first_audio.append(seconds)
        key = voice_key(request)
        if key is not None:
            self.voices.pop(key, None)
            self.voices[key] = None
        while len(self.voices) > REMEMBERED_VOICES:
            self.voices.popitem(last=False)

    def end_request(self, seconds: float, how: RequestOutcome) -> None:
        self.in_flight -= 1
        self.failed += how is RequestOutcome.FAILED
        self.cancelled += how is RequestOutcome.CANCELLED
        if how is RequestOutcome.COMPLETED:
            self.whole.append(seconds)


def percentiles(seconds: deque[float]) -> dict[str, float] | None:
    """The middle and the slow end of the last speeches; None as long as there are none."""
    if not seconds:
        return None
    if len(seconds) == 1:
        return {"p50": round(seconds[0], 4), "p95": round(seconds[0], 4)}
    cuts = quantiles(seconds, n=20, method="inclusive")
    return {"p50": round(cuts[9], 4), "p95": round(cuts[18], 4)}
