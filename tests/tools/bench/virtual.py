"""An event loop with a virtual clock and a speech server with exact delays, so that load tests are deterministic."""

import asyncio
import selectors
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random

import httpx

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
class VirtualServer(httpx.AsyncBaseTransport):
    """Responds after `first` seconds, then sends `pieces` chunks `gap` seconds apart; at most `slots` concurrently."""

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

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(await request.aread())
        if self.fails and len(self.bodies) % self.fails == 0:
            return httpx.Response(429)
        pieces = 0 if self.silent and len(self.bodies) % self.silent == 0 else self.pieces
        await self._free.acquire()
        await asyncio.sleep(self._delay(self.first))
        return httpx.Response(200, headers={"content-type": "audio/pcm"}, stream=_Stream(self, pieces))

    def _delay(self, seconds: float) -> float:
        return seconds * (1 + self.jitter * self._rng.random())

    async def speak(self, pieces: int) -> AsyncIterator[bytes]:
        try:
            for number in range(pieces):
                if number:
                    await asyncio.sleep(self._delay(self.gap))
                yield b"\0\0" * round(RATE * self.piece_seconds)
        finally:
            self._free.release()


@dataclass
class _Stream(httpx.AsyncByteStream):
    server: VirtualServer
    pieces: int

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.server.speak(self.pieces)
