"""State that all requests of one serving process share, with or without HTTP in front of it."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.api.admission import AdmissionQueue, BodyBudget
from shoal.api.config import ServerConfig
from shoal.api.engine_client import EngineLifecycle
from shoal.api.exceptions import Unauthorized
from shoal.api.key_usage import KeyUsageTracker, UsageFile, UsageRecorder
from shoal.api.keys import ANONYMOUS, Key, KeyFile, KeyRing, key_from_settings
from shoal.api.output import OutputEncoder
from shoal.api.voices.kept_speech import KeptSpeechStore
from shoal.errors import ShoalError, counted
from shoal.metrics import Metrics
from shoal.speech import Samples
from shoal.voices.transcriber import Transcriber

logger = logging.getLogger(__name__)

KEY_CHECK_SECONDS = 2.0


@dataclass(slots=True)
class EngineStatsCache:
    """The engine's last known statistics. At most one query is pending, however slowly the engine answers."""

    latest: dict[str, Any] | None = None
    _query: asyncio.Task[None] | None = None

    async def refresh(self, lifecycle: EngineLifecycle, timeout: float = 1.0) -> None:
        """Query the engine, and wait at most `timeout` seconds for the answer."""
        if self._query is None or self._query.done():
            self._query = asyncio.create_task(self._fetch(lifecycle))
        await asyncio.wait([self._query], timeout=timeout)

    async def _fetch(self, lifecycle: EngineLifecycle) -> None:
        try:
            if lifecycle.engine is not None and lifecycle.state == "ready":
                self.latest = await asyncio.to_thread(lifecycle.engine.service.statistics)
        except ShoalError as problem:
            logger.warning("no engine statistics, serving the previous ones: %s", problem)


@dataclass(eq=False)
class ServerState:
    """State that all requests share. Not thread-safe: use it on the event loop only."""

    config: ServerConfig
    lifecycle: EngineLifecycle
    metrics: Metrics
    key_usage: KeyUsageTracker
    queue: AdmissionQueue
    body_budget: BodyBudget
    encoder_pool: ThreadPoolExecutor
    keys: KeyRing = field(default=KeyRing(()))
    engine_stats: EngineStatsCache = field(default_factory=EngineStatsCache)
    usage: UsageRecorder | None = None
    kept_speech: KeptSpeechStore = field(default_factory=lambda: KeptSpeechStore(0, 0.0, 0.0))
    transcriber: Transcriber = field(default_factory=Transcriber)  # runs in `convert_pool`
    # Dedicated executor: converting an hour of audio must not block streaming encoders or body parsing.
    convert_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "shoal-convert"))

    @property
    def requires_key(self) -> bool:
        """Return True also for a key file without keys: deleting the last key must not open the server."""
        return bool(self.config.api_keys) or self.config.keys_file is not None

    def enter_queue(self, key: Key) -> None:
        """Take a place in the admission queue. Raises EngineBusy; with several keys, each has a share of the queue."""
        self.queue.acquire(key.name, shared=len(self.keys) > 1)

    def leave_queue(self, key: Key, seconds: float) -> None:
        """Release the place of a request that took `seconds`."""
        self.queue.release(seconds, key.name)

    async def encode(self, encoder: OutputEncoder, work: Callable[..., bytes], *args: Samples) -> bytes:
        """Run a method of an encoder in the encoder threads, whose number bounds its CPU use.

        Calls that only convert samples run on the event loop: handing them to a thread would take longer.
        """
        if encoder.only_converts:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self.encoder_pool, work, *args)

    def authenticate(self, authorization: str) -> Key:
        """Return the key in an Authorization header value. Raises Unauthorized; a server without keys accepts any."""
        if not self.requires_key:
            return ANONYMOUS
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Unauthorized("this server needs a key: send Authorization: Bearer KEY, or xi-api-key: KEY")
        found = self.keys.find(secret.strip())
        if found is None:
            raise Unauthorized("Invalid token")
        return found

    async def watch_keys(self) -> None:
        """Reload the key file when it changes; a broken file leaves the loaded keys in place."""
        path = self.config.keys_file or self.config.upcoming_keys_file
        if path is None:
            return
        file = KeyFile(path)
        seen = await asyncio.to_thread(file.version) if self.config.keys_file is not None else None
        while True:
            await asyncio.sleep(KEY_CHECK_SECONDS)
            version = await asyncio.to_thread(file.version)
            if version != seen:
                seen = version
                self.config = replace(self.config, keys_file=path)
                await self._reload_keys(file)

    async def record_usage(self) -> None:
        if self.usage is not None:
            await self.usage.run()

    async def _reload_keys(self, file: KeyFile) -> None:
        try:
            self.keys = await asyncio.to_thread(load_keys, self.config)
            logger.info("loaded %s: %s has changed", counted(len(self.keys), "key"), file.path.name)
        except ShoalError as problem:
            logger.warning("keys not reloaded, keeping the previous ones: %s", problem)


def create_state(config: ServerConfig, lifecycle: EngineLifecycle, slots: int) -> ServerState:
    """Read the key and usage files and create the state. Raises InvalidRequest for an invalid key file."""
    engine_stats, key_usage, limits = EngineStatsCache(), KeyUsageTracker(config.key_limits), config.limits
    return ServerState(
        config,
        lifecycle,
        Metrics(lambda: engine_stats.latest),
        key_usage,
        AdmissionQueue(config.capacity, slots),
        BodyBudget(limits.all_bodies_bytes),
        ThreadPoolExecutor(config.encoding_threads, thread_name_prefix="shoal-encode"),
        load_keys(config),
        engine_stats,
        UsageRecorder(key_usage, UsageFile(config.usage_file)) if config.usage_file is not None else None,
        KeptSpeechStore(limits.kept_speech_bytes, limits.kept_speech_seconds, limits.reference_seconds),
    )


def load_keys(config: ServerConfig) -> KeyRing:
    """Return the keys of the settings and of the key file. Blocks on file I/O."""
    configured = [key_from_settings(number, key, config.key_limits) for number, key in enumerate(config.api_keys, 1)]
    stored = [key.load_lexicon() for key in KeyFile(config.keys_file).read()] if config.keys_file is not None else []
    if config.keys_file is not None and not stored:
        logger.warning("%s has no keys: create one with `shoal keys new NAME --file FILE`", config.keys_file)
    return KeyRing([*configured, *stored])
