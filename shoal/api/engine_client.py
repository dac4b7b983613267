"""Access to the engine: the interface it offers, the handle a request uses, and its lifecycle in the server."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from shoal.api.exceptions import NotReady
from shoal.api.voices.openai import assign_openai_voices
from shoal.engine.process.messages import Backends, ModelInfo
from shoal.engine.process.supervisor import Activity, Supervisor
from shoal.engine.process.worker import EngineSource
from shoal.speech import AudioChunk, Samples, SamplingParams, SpeechRequest
from shoal.text.lexicon import Lexicon, read_lexicon
from shoal.text.plan import TextRules
from shoal.text.prompt import Codes
from shoal.voices.store import VoiceStore
from shoal.voices.voice import voice_limits

DEFAULT_RULES = TextRules()
logger = logging.getLogger(__name__)


class AudioStream(Protocol):
    """Chunks as they are generated: an async generator or `ReplyStream`."""

    def __aiter__(self) -> AsyncIterator[AudioChunk]: ...
    def __anext__(self) -> Awaitable[AudioChunk]: ...
    def aclose(self) -> Awaitable[None]:
        """Cancel the request unless it has ended."""


class SpeechService(Protocol):
    """An engine in this process, in a child process or on a cluster."""

    @property
    def ready(self) -> bool: ...
    @property
    def default_sampling(self) -> SamplingParams: ...
    @property
    def default_voice(self) -> str | None: ...
    @property
    def sample_rate(self) -> int: ...

    def speak(self, request: SpeechRequest, deadline: float | None = None) -> AudioStream:
        """Return the chunks of a request, which may be submitted now or when the first chunk is awaited.

        `deadline` is absolute, in `time.monotonic()` seconds; without it the request's timeout starts now.
        """

    async def aencode(self, audio: bytes) -> Codes:
        """Return the codes [codebooks, frames] of a recording. Cancelling the task cancels the work."""

    async def adecode(self, codes: Codes) -> Samples:
        """Return the samples of codes [codebooks, frames]. Cancelling the task cancels the work."""

    def statistics(self) -> dict[str, Any]:
        """Return the engine's current counters and gauges, nested by component. Blocks."""

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """A loaded engine with its voices. A request resolves it once and passes it down."""

    service: SpeechService
    voices: VoiceStore
    frame_rate: float  # frames per second
    backends: Callable[[], Backends] = Backends  # returns the backends in use now
    text_rules: TextRules = DEFAULT_RULES
    lexicon: Lexicon | None = None
    clones: bool = True  # whether the model speaks with the voice of a recording
    openai_voices: Mapping[str, str] = field(default_factory=dict)  # OpenAI voice name -> built-in voice
    activity: Callable[[], Activity] = lambda: "awake"
    word_times: bool = False  # whether requests may ask for timestamps


def load_engine(source: EngineSource, voices: Path) -> EngineHandle:
    """Start an engine process and wait until it is ready. Blocks for as long as loading the model takes."""
    return start_engine(Supervisor(source), voices)


def start_engine(supervisor: Supervisor, voices: Path) -> EngineHandle:
    """Start the supervisor's engine process and wait until it is ready. Raises the error that prevented it."""
    supervisor.start()
    handle = engine_handle(supervisor, supervisor.model_info, supervisor.source, voices)
    return replace(handle, backends=lambda: supervisor.model_info.backends, activity=lambda: supervisor.activity)


def engine_handle(service: SpeechService, info: ModelInfo, source: EngineSource, voices: Path) -> EngineHandle:
    """Return the handle of a running engine, with the voice store at `voices`."""
    limits = voice_limits(source.config.reference_seconds, info.prompt_seconds)
    store = VoiceStore(voices, info.builtin_voices, sample_rate=info.sample_rate, limits=limits)
    lexicon = None if source.lexicon is None else read_lexicon(source.lexicon)
    return EngineHandle(
        service,
        store,
        info.frame_rate,
        lambda: info.backends,
        info.text_rules,
        lexicon,
        info.clones,
        assign_openai_voices(store, info.default_voice),
        word_times=info.word_times,
    )


class EngineLifecycle:
    """Loads the engine in a thread, so that the server answers `/health` meanwhile, and closes it at shutdown.

    `engine`: already loaded, so `load` is not called. `abort` interrupts a load, which may take minutes, at shutdown.
    """

    def __init__(
        self,
        load: Callable[[], EngineHandle],
        engine: EngineHandle | None = None,
        abort: Callable[[], None] | None = None,
    ) -> None:
        self._load, self._abort = load, abort
        self._engine = engine
        self._stopping = False
        self._stopped_at = 0.0  # when shutdown began, monotonic
        self.drain_ended = False  # the server ends the requests that are still in flight
        self.failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """One of starting, ready, restarting, stopping, failed."""
        if self._stopping:
            return "stopping"
        if self.failure is not None:
            return "failed"
        if self._engine is None:
            return "starting"
        return "ready" if self._engine.service.ready else "restarting"

    @property
    def engine(self) -> EngineHandle | None:
        return self._engine

    def require_engine(self) -> EngineHandle:
        """Return the engine. Raises NotReady before the model is loaded and during shutdown."""
        if self._engine is None or self._stopping:
            raise NotReady(f"the model is not ready: the server is {self.state}")
        return self._engine

    def start(self, on_failure: Callable[[], None]) -> None:
        if self._engine is None:
            self._task = asyncio.create_task(self._start())
            self._task.add_done_callback(lambda task: self._record_failure(task, on_failure))

    def begin_shutdown(self) -> None:
        """Reject new requests from now on."""
        self._stopping = True
        self._stopped_at = self._stopped_at or time.monotonic()

    async def close(self, drain_seconds: float) -> None:
        """Drain and stop the engine, at the latest `drain_seconds` after `begin_shutdown`."""
        self.begin_shutdown()
        if self._task is not None:
            if self._engine is None and self._abort is not None:
                await asyncio.to_thread(self._abort)
            await asyncio.wait([self._task])
        if self._engine is not None:
            remaining = max(0.0, drain_seconds - (time.monotonic() - self._stopped_at))
            await asyncio.to_thread(self._engine.service.close, drain=True, timeout=remaining)

    async def _start(self) -> None:
        started = time.monotonic()
        self._engine = await asyncio.to_thread(self._load)
        backends = self._engine.backends()
        seconds = time.monotonic() - started
        logger.info("engine ready after %.1f s (backend %s, codec %s)", seconds, backends.model, backends.codec)

    def _record_failure(self, task: asyncio.Task[None], on_failure: Callable[[], None]) -> None:
        """Store the error of a failed load; `serve` raises it after the server has stopped."""
        failure = None if task.cancelled() else task.exception()
        if failure is not None and not self._stopping:
            self.failure = failure
            on_failure()
