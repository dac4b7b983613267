"""An event loop with a virtual clock and a speech server with exact delays, so that load tests are deterministic."""

import asyncio
import selectors
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from urllib.parse import urlsplit

RATE = 24_000


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop that advances its clock to the next timer instead of waiting."""

    _now = 1000.0
    _scheduled: list[asyncio.TimerHandle]
    _ready: list[asyncio.Handle]
    _selector: selectors.BaseSelector

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled and not self._selector.select(0):
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


@dataclass
class VirtualServer:
    """HTTP client of a server without a network.

    The server responds after `first` seconds, then sends `pieces` chunks `gap` seconds apart; at most `slots` at once.
    """

    first: float = 0.2
    gap: float = 0.05
    pieces: int = 10
    piece_seconds: float = 0.1
    slots: int = 1000
    jitter: float = 0.0  # every delay is longer by up to this share
    fails: int = 0  # every n-th request is rejected
    silent: int = 0  # every n-th request is answered without audio
    seed: int = 0
    bodies: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng, self._free = Random(self.seed), asyncio.Semaphore(self.slots)

    @asynccontextmanager
    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator["VirtualAnswer"]:
        self.bodies.append(body)
        if self.fails and len(self.bodies) % self.fails == 0:
            yield VirtualAnswer(self, 0, status=429)
            return
        pieces = 0 if self.silent and len(self.bodies) % self.silent == 0 else self.pieces
        async with self._free:
            await asyncio.sleep(self._delay(self.first))
            yield VirtualAnswer(self, pieces)

    def _delay(self, seconds: float) -> float:
        return seconds * (1 + self.jitter * self._rng.random())

    async def speak(self, pieces: int) -> AsyncIterator[bytes]:
        for number in range(pieces):
            if number:
                await asyncio.sleep(self._delay(self.gap))
            yield b"\0\0" * round(RATE * self.piece_seconds)


class VirtualServers:
    """HTTP client of several servers, by host and port."""

    def __init__(self, servers: Mapping[str, VirtualServer]) -> None:
        self.servers = servers

    @asynccontextmanager
    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator["VirtualAnswer"]:
        async with self.servers[urlsplit(url).netloc].post(url, body, headers) as answer:
            yield answer


@dataclass
class VirtualAnswer:
    server: VirtualServer
    count: int
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "audio/pcm"})

    def pieces(self) -> AsyncIterator[bytes]:
        return self.server.speak(self.count)
