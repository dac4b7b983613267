"""The count of one speech: let in, heard, ended. Every number about it is written down here, once."""

import asyncio
import logging
import time

from starlette.requests import ClientDisconnect

from shoal.server.error_responses import kind_of
from shoal.server.keys import Key
from shoal.server.state import Desk
from shoal.speech import AudioChunk

logger = logging.getLogger(__name__)


class Tally:
    """Raises EngineBusy, RateLimited or QuotaExceeded when it cannot begin; `end` gives the place back, once."""

    def __init__(self, desk: Desk, api: str, key: Key, request_id: str, *, placed: bool = False) -> None:
        """`placed`: whoever begins it has a place in the backlog already, and keeps it."""
        self._desk, self._api, self._key, self._id, self._placed = desk, api, key, request_id, placed
        self._began = time.monotonic()
        self.seconds = 0.0  # of audio
        self._ended = False
        if not placed:
            desk.backlog.begin()
        try:
            desk.meters.begin(key)
        except Exception:
            self._leave(desk.backlog.usual_seconds)
            raise
        desk.metrics.under_way.inc()

    def heard(self, chunk: AudioChunk) -> None:
        if not self.seconds and len(chunk.samples):
            self._desk.metrics.first_audio.labels(self._api).observe(time.monotonic() - self._began)
        self.seconds += chunk.seconds
        self._desk.meters.count_audio(self._key, chunk.seconds)
        self._desk.metrics.audio_seconds.labels(self._key.name).inc(chunk.seconds)

    def end(self, error: BaseException | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        took = time.monotonic() - self._began
        self._leave(took)
        self._desk.meters.end(self._key)
        self._desk.metrics.under_way.dec()
        self._record(took, error)

    def _leave(self, seconds: float) -> None:
        if not self._placed:
            self._desk.backlog.end(seconds)

    def _record(self, took: float, error: BaseException | None) -> None:
        metrics, outcome = self._desk.metrics, outcome_of(error)
        metrics.speeches.labels(self._api, outcome).inc()
        if error is None:
            metrics.speech_seconds.labels(self._api).observe(took)
            if self.seconds:
                metrics.real_time_factor.observe(took / self.seconds)
        elif outcome != "disconnected":
            metrics.errors.labels(outcome).inc()
        logger.info(
            "%s: %s, %.2f s of audio in %.2f s",
            self._id,
            outcome,
            self.seconds,
            took,
            extra={"api": self._api, "key": self._key.name, "audio_seconds": round(self.seconds, 3)},
        )


def outcome_of(error: BaseException | None) -> str:
    if error is None:
        return "spoken"
    left = isinstance(error, asyncio.CancelledError | GeneratorExit | ClientDisconnect)
    return "disconnected" if left else kind_of(error)
