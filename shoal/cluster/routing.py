"""Routing strategies: order the replicas by preference; the first one that accepts the request serves it.

A strategy only depends on its arguments, so the simulator runs the same code.
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
    """Replica that could take the request."""

    id: str
    load: int  # requests in flight
    slots: int  # sequences it generates at the same time

    @property
    def full(self) -> bool:
        """True if the next request would wait for a slot."""
        return self.load >= self.slots


class Strategy(Protocol):
    def order(self, voice: str | None, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return all candidates, best first. `voice` is the `voice_key` of the request."""


class RoundRobin:
    """Cycles through the replicas, regardless of load."""

    def __init__(self) -> None:
        self._next = 0

    def order(self, voice: str | None, candidates: Sequence[Candidate]) -> list[Candidate]:
        if not candidates:
            return []
        ring = sorted(candidates, key=lambda candidate: candidate.id)
        first = self._next % len(ring)
        self._next += 1
        return ring[first:] + ring[:first]


class LeastConnections:
    """Prefers the replica with the lowest load; round robin among equals."""

    def __init__(self) -> None:
        self._round_robin = RoundRobin()

    def order(self, voice: str | None, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(self._round_robin.order(voice, candidates), key=lambda candidate: candidate.load)


class VoiceAffinity:
    """Sends a voice to the same replica, where its prefix is cached, and to fixed alternatives when that is full.

    Replicas are ranked per voice by rendezvous hashing: when a replica is added or removed, only the voices of that
    replica move. A popular voice overflows to its own second choice rather than to any replica, so it is cached on a
    few replicas and not on all. When all slots are taken, the replica with the lowest load is next.
    """

    def __init__(self) -> None:
        self._least_connections = LeastConnections()

    def order(self, voice: str | None, candidates: Sequence[Candidate]) -> list[Candidate]:
        if voice is None or all(candidate.full for candidate in candidates):
            return self._least_connections.order(voice, candidates)
        ranked = sorted(candidates, key=lambda candidate: _rendezvous_score(voice, candidate.id), reverse=True)
        # The sort is stable: free replicas keep their rank, followed by full ones in theirs.
        return sorted(ranked, key=lambda candidate: candidate.full)


STRATEGIES: dict[StrategyName, Callable[[], Strategy]] = {
    "round-robin": RoundRobin,
    "least-connections": LeastConnections,
    "voice-affinity": VoiceAffinity,
}


def check_strategy(name: str) -> StrategyName:
    """Return the name if it is a known strategy. Raises InvalidRequest."""
    found = next((known for known in STRATEGIES if known == name), None)
    if found is None:
        raise InvalidRequest(f"unknown strategy {name!r}; use one of {', '.join(STRATEGIES)}")
    return found


def make_strategy(name: str) -> Strategy:
    return STRATEGIES[check_strategy(name)]()


def voice_key(request: SpeechRequest) -> str | None:
    """Return a key that all requests of one voice share: its name, or a hash of its recordings."""
    # Names with the same fallback voice share its replica.
    name = request.fallback_voices[0] if request.fallback_voices else request.voice
    if name is not None or request.voices:
        return f"name:{name or ','.join(request.voices)}"
    if not request.recordings:
        return None
    content = blake2b(digest_size=16)
    for recording in request.recordings:
        content.update(blake2b(recording.audio).digest() + blake2b(recording.transcript.encode()).digest())
    return f"content:{content.hexdigest()}"


def _rendezvous_score(voice: str, candidate: str) -> bytes:
    """Return the rendezvous hash of a candidate and a voice, the same in every process."""
    return blake2b(f"{candidate}\0{voice}".encode(), digest_size=8).digest()
