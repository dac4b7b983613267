"""Account for requests: every admitted request, speech or not, is limited, measured and logged here, exactly once."""

import asyncio
import logging
import time
import unicodedata
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import lru_cache
from types import TracebackType
from typing import Self, TypeVar

from shoal.api.exceptions import ClientDisconnected, error_code
from shoal.api.keys import Key
from shoal.api.state import ServerState
from shoal.errors import DeadlineExceeded
from shoal.speech import AudioChunk, SpeechRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

Work = Callable[[], Awaitable[T]]


class RequestAccounting:
    """Accounting of one request. Raises EngineBusy, RateLimited or QuotaExceeded when it cannot be admitted.

    As a context manager it calls `finish` with the exception that left the block.
    """

    def __init__(
        self,
        state: ServerState,
        api: str,
        key: Key,
        request_id: str,
        *,
        queued: bool = False,
        expected_seconds: float = 0.0,
    ) -> None:
        """`queued`: the caller holds a place in the admission queue and releases it itself.

        `expected_seconds` of audio are reserved from the key's daily quota until the request ends.
        """
        self._state, self._api, self._key, self._id, self._queued = state, api, key, request_id, queued
        self.started = time.monotonic()
        self.audio_seconds = 0.0
        self._audio_counter = state.metrics.audio_seconds.labels(key.name)
        self._finished = False
        with ExitStack() as undo:
            if not queued:
                state.enter_queue(key)
                undo.callback(state.leave_queue, key, state.queue.average_seconds)
            self._reservation = state.key_usage.acquire(key, expected_seconds)
            undo.pop_all()
        state.metrics.in_flight.inc()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish(error)

    def record_audio(self, chunk: AudioChunk) -> None:
        if not self.audio_seconds and len(chunk.samples):
            self._state.metrics.time_to_first_audio.labels(self._api).observe(time.monotonic() - self.started)
        self.audio_seconds += chunk.seconds
        self._state.key_usage.record_audio(self._key, chunk.seconds, self._reservation)
        self._audio_counter.inc(chunk.seconds)

    def finish(self, error: BaseException | None = None) -> None:
        """Release the queue place and record the outcome. Only the first call has an effect."""
        if self._finished:
            return
        self._finished = True
        seconds = time.monotonic() - self.started
        if not self._queued:
            self._state.leave_queue(self._key, seconds)
        self._state.key_usage.release(self._key, self._reservation)
        self._state.metrics.in_flight.dec()
        self._record(seconds, error)

    def _record(self, seconds: float, error: BaseException | None) -> None:
        metrics, outcome = self._state.metrics, outcome_of(error, drain_ended=self._state.lifecycle.drain_ended)
        metrics.requests.labels(self._api, outcome).inc()
        if error is None:
            metrics.generation_seconds.labels(self._api).observe(seconds)
            if self.audio_seconds:
                metrics.real_time_factor.observe(seconds / self.audio_seconds)
        elif outcome not in ("disconnected", "interrupted"):
            metrics.errors.labels(outcome).inc()
        logger.info(
            "%s: %s, %.2f s of audio in %.2f s",
            self._id,
            outcome,
            self.audio_seconds,
            seconds,
            extra={"api": self._api, "key": self._key.name, "audio_seconds": round(self.audio_seconds, 3)},
        )


def outcome_of(error: BaseException | None, *, drain_ended: bool) -> str:
    """Return the outcome of a request as a metric label: completed, disconnected, shutdown or an error code."""
    if error is None:
        return "completed"
    disconnected = isinstance(error, asyncio.CancelledError | GeneratorExit | ClientDisconnected)
    if disconnected:
        return "shutdown" if drain_ended else "disconnected"
    return error_code(error)


def expected_seconds(request: SpeechRequest, frame_rate: float) -> float:
    """Return an upper estimate of the audio of a request in seconds, at most its maximum number of frames."""
    seconds = sum(map(_seconds_of, request.text)) + 0.5
    frames = None if request.sampling is None else request.sampling.max_frames
    return min(seconds, frames / frame_rate) if frames else seconds


@lru_cache(maxsize=4096)
def _seconds_of(character: str) -> float:
    """Return the estimated time to speak one character. Digits are spelled out; a wide character is a syllable."""
    if character.isdigit():
        return 0.35
    return 0.3 if unicodedata.east_asian_width(character) in "WF" else 0.08


async def run_admitted(
    state: ServerState, api: str, key: Key, request_id: str, work: Work[T], wait_for_disconnect: Work[None]
) -> T:
    """Run work that is not speech under the same limits, deadline and accounting as speech.

    Raises what RequestAccounting raises, DeadlineExceeded, and ClientDisconnected when the client disconnects first.
    """
    seconds = state.config.limits.request_seconds
    with RequestAccounting(state, api, key, request_id):
        return await cancel_on_disconnect(wait_for_disconnect, lambda: _with_timeout(seconds, work))


async def cancel_on_disconnect(wait_for_disconnect: Work[None], work: Work[T]) -> T:
    """Return the result of `work`; cancel it and raise ClientDisconnected when the client disconnects first."""
    task, watch = asyncio.ensure_future(work()), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return await task
    finally:
        task.cancel()
        watch.cancel()


async def _with_timeout(seconds: float, work: Work[T]) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await work()
    except TimeoutError:
        raise DeadlineExceeded(f"the request took longer than {seconds:g} seconds") from None
