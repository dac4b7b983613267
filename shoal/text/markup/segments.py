"""Segments of a marked-up text: passages that are spoken one way, and pauses between them."""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.errors import TextError

MAX_PAUSE_SECONDS = 10.0
# Silence costs nothing to ask for: without a limit, a short text could make an hour of audio.
MAX_TOTAL_PAUSE_SECONDS = 120.0
MAX_VOICES = 16


@dataclass(frozen=True, slots=True)
class Delivery:
    """Voice, rate and volume of a passage."""

    voice: str | None = None  # name of a stored voice; None: the voice of the request
    rate: float = 1.0
    decibels: float = 0.0


AS_REQUESTED = Delivery()


@dataclass(frozen=True, slots=True)
class Passage:
    """Text that is spoken with one delivery."""

    text: str
    delivery: Delivery = AS_REQUESTED


@dataclass(frozen=True, slots=True)
class Pause:
    """Silence of exactly this duration."""

    seconds: float


Segment = Passage | Pause


def check_segments(segments: Iterable[Segment]) -> None:
    """Raise TextError when all pauses together are too long, or too many voices are used."""
    found = list(segments)
    silence = sum(each.seconds for each in found if isinstance(each, Pause))
    if silence > MAX_TOTAL_PAUSE_SECONDS:
        raise TextError(f"the pauses of the text take {silence:g} s, the limit is {MAX_TOTAL_PAUSE_SECONDS:g} s")
    voices = {each.delivery.voice for each in found if isinstance(each, Passage)} - {None}
    if len(voices) > MAX_VOICES:
        raise TextError(f"the text uses {len(voices)} voices, the limit is {MAX_VOICES}")
