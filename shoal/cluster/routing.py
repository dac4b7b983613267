"""Which replica speaks a request. Pure: what a strategy knows is its arguments, so the simulator runs the same code.

A strategy puts the replicas in order of preference; the first that takes the request gets it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Protocol

from shoal.errors import InvalidRequest
from shoal.speech import SpeechRequest

StrategyName = Literal["round-robin", "least-connections", "voice-affinity"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could take the request."""

    id: str
    load: int  # requests it has and has not ended
    slots: int  # voices it speaks at one time

    @property
    def full(self) -> bool:
        """Whether the next request would have to wait for a slot."""
        return self.load >= self.slots


class Strategy(Protocol):
    def order(self, voice: str | None, candidates: Sequence[Candidate]) -> list[Candidate]:
        """All candidates, best first. `voice` is the key of the voice that is asked for, if one is."""


class RoundRobin:
    """Each in its turn, whatever they carry."""

    def __init__(self) -> None:
        self._turn = 0

    def order(self, voice: str | None, candidates: Sequence[Candidate]) -> list[Candidate]:
        if not candidates:
            return []
        ring = sorted(candidates, key=lambda candidate: candidate.id)
        first = self._turn % len(ring)
        self._turn += 1
        return ring[first:] + ring[:first]


class LeastConnections:
    """Whoever carries least; among equals, each in its turn."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def order(self, voice: str | None, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(self._turns.order(voice, candidates), key=lambda candidate: candidate.load)


class VoiceAffinity:
    """A voice has a home, where its prefix is cached, and further homes for when that is full.

    Homes are found by rendezvous hashing: when a replica comes or goes, only the voices that are or were at home there
    move. A voice spills over to its own second home, not to any replica, so that a voice that is often too much for one
    is cached in a few and not in all. When every slot is taken, whoever carries least is next.
    """

    def __init__(self) -> None:
        self._anywhere = LeastConnections()

    def order(self, voice: str | None, candidates: Sequence[Candidate]) -> list[Candidate]:
        if voice is None or all(candidate.full for candidate in candidates):
            return self._anywhere.order(voice, candidates)
        homes = sorted(candidates, key=lambda candidate: _pull(voice, candidate.id), reverse=True)
        # Stable: the free ones keep the order of homes, and so do the full ones behind them.
        return sorted(homes, key=lambda candidate: candidate.full)


STRATEGIES: dict[StrategyName, Callable[[], Strategy]] = {
    "round-robin": RoundRobin,
    "least-connections": LeastConnections,
    "voice-affinity": VoiceAffinity,
}


def check_strategy(name: str) -> StrategyName:
    """Raises InvalidRequest for a name that is none."""
    found = next((known for known in STRATEGIES if known == name), None)
    if found is None:
        raise InvalidRequest(f"unknown strategy {name!r}: {', '.join(STRATEGIES)}")
    return found


def make_strategy(name: str) -> Strategy:
    return STRATEGIES[check_strategy(name)]()


def voice_key(request: SpeechRequest) -> str | None:
    """What requests of one voice have in common: its name, or the content of its recordings."""
    if request.voice is not None:
        return f"name:{request.voice}"
    if not request.recordings:
        return None
    content = blake2b(digest_size=16)
    for recording in request.recordings:
        content.update(blake2b(recording.audio).digest() + blake2b(recording.transcript.encode()).digest())
    return f"content:{content.hexdigest()}"


def _pull(voice: str, candidate: str) -> bytes:
    """How strongly a candidate draws a voice: the same everywhere and in every process."""
    return blake2b(f"{candidate}\0{voice}".encode(), digest_size=8).digest()
