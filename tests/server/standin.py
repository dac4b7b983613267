"""A fake engine under the test's control, and a server around it in the test's process."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from shoal.api.config import Limits, ServerConfig
from shoal.api.engine_client import EngineHandle, EngineLifecycle
from shoal.api.state import ServerState, create_state
from shoal.server.app import create_app
from shoal.server.protocol import protocol_options
from shoal.speech import AudioChunk, Samples, SamplingParams, SpeechRequest, SpokenTurn
from shoal.text.prompt import Codes
from shoal.voices.store import VoiceStore
from tests.server.conftest import free_port
from tests.waiting import wait_until

RATE = 16_000


class Standin:
    """Fake engine: returns 0.1 s of audio at once, and `rest` samples after `go_on` is set; encodes after that, too."""

    ready, default_sampling, default_voice, sample_rate = True, SamplingParams(), None, RATE

    def __init__(self, rest: int = RATE, pause: float = 0.0) -> None:
        self.rest, self.pause = rest, pause  # samples, seconds
        self.go_on = threading.Event()
        self.begun: list[str] = []
        self.contexts: list[tuple[str, ...] | None] = []  # texts of the turns that each request continues
        self.spoken: list[str] = []
        self.ended: list[str] = []  # texts whose last chunk was received
        self.encoding = self.left = 0

    async def speak(self, request: SpeechRequest, deadline: float | None = None) -> AsyncGenerator[AudioChunk, None]:
        self.begun.append(request.text)
        before = request.context
        self.contexts.append(None if before is None else tuple(turn.text for turn in before))
        context = None if before is None else (*before, SpokenTurn(request.text, np.zeros((10, 1), np.int32)))
        yield AudioChunk(np.full(RATE // 10, 0.1, np.float32), RATE)
        await asyncio.sleep(self.pause)
        await self._may()
        self.spoken.append(request.text)
        yield AudioChunk(np.full(self.rest, 0.1, np.float32), RATE, "stop", context)
        self.ended.append(request.text)

    async def aencode(self, audio: bytes) -> Codes:
        self.encoding += 1
        try:
            await self._may()
        except asyncio.CancelledError:
            self.left += 1
            raise
        return np.zeros((10, 5), np.int32)

    async def adecode(self, codes: Codes) -> Samples:
        return np.zeros(RATE, np.float32)

    def statistics(self) -> dict[str, Any]:
        return {}

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        self.go_on.set()

    async def _may(self) -> None:
        while not self.go_on.is_set():
            await asyncio.sleep(0.01)


def state_with(standin: Standin, limits: Limits, voices: Path) -> ServerState:
    engine = EngineHandle(standin, VoiceStore(voices), 25.0)
    return create_state(ServerConfig(limits=limits), EngineLifecycle(lambda: engine, engine), 4)


@contextmanager
def listening(state: ServerState) -> Iterator[int]:
    """Run a server in a thread and return its port."""
    port = free_port()
    config = uvicorn.Config(
        create_app(state),
        port=port,
        **protocol_options(state.config.limits, state.body_budget),
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield port
    finally:
        server.should_exit = True
        thread.join(240)


def counted(state: ServerState, api: str, outcome: str) -> float:
    return state.metrics.registry.get_sample_value("shoal_requests_total", {"api": api, "outcome": outcome}) or 0.0
