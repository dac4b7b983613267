"""Usage of API keys: rate, concurrency and daily audio limits, and a file that keeps daily usage across restarts.

The file is written every few seconds and at shutdown, so a killed server loses at most the last few seconds of usage.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from shoal.api.config import KeyLimits
from shoal.api.exceptions import QuotaExceeded, RateLimited
from shoal.api.keys import Key
from shoal.errors import ShoalError, describe_error
from shoal.paths import atomic_write, output_errors

logger = logging.getLogger(__name__)

SAVE_SECONDS = 2.0

Clock = Callable[[], float]
Now = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class KeyUsage:
    """Usage of one key. Requests take tokens from a bucket that refills within a minute."""

    tokens: float
    refilled: float  # clock time of the last refill
    in_flight: int = 0
    reserved_seconds: float = 0.0  # audio that requests in flight are expected to add
    day: str = ""  # UTC, ISO
    audio_seconds: float = 0.0  # on that day
    has_quota: bool = False


@dataclass(slots=True)
class AudioReservation:
    """Seconds of audio that one request is still expected to produce."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DailyAudio:
    """Seconds of audio on a day (UTC, ISO)."""

    day: str
    seconds: float


class KeyUsageTracker:
    """Enforces the limits of every key. `daily_audio` and `restore` carry usage across a restart. Not thread-safe."""

    def __init__(self, defaults: KeyLimits, clock: Clock = time.monotonic, now: Now = utc_now) -> None:
        self._defaults, self._clock, self._now = defaults, clock, now
        self._usage: dict[str, KeyUsage] = {}

    def limits_for(self, key: Key) -> KeyLimits:
        """Return the key's own limits, with the defaults where it has none."""
        own, defaults = key.limits, self._defaults
        return KeyLimits(
            own.requests_per_minute or defaults.requests_per_minute,
            own.concurrency or defaults.concurrency,
            own.daily_audio_seconds or defaults.daily_audio_seconds,
        )

    def count_request(self, key: Key) -> None:
        """Count a request against the rate limit of its key. Raises RateLimited when the limit is exceeded."""
        limit = self.limits_for(key).requests_per_minute
        if limit is None:
            return
        usage, now = self._usage_of(key), self._clock()
        usage.tokens = min(limit, usage.tokens + (now - usage.refilled) * limit / 60)
        usage.refilled = now
        if usage.tokens < 1:
            raise RateLimited(f"this key may send {limit} requests a minute", (1 - usage.tokens) * 60 / limit)
        usage.tokens -= 1

    def acquire(self, key: Key, expected_seconds: float = 0.0) -> AudioReservation:
        """Start a request of this key and reserve the audio it is expected to produce.

        Raises RateLimited or QuotaExceeded.
        """
        limits, usage = self.limits_for(key), self._usage_of(key)
        if limits.daily_audio_seconds is not None:
            self._check_quota(usage, limits.daily_audio_seconds, expected_seconds)
        if limits.concurrency is not None and usage.in_flight >= limits.concurrency:
            raise RateLimited(f"this key may have {limits.concurrency} requests in flight at one time", 1.0)
        usage.in_flight += 1
        usage.reserved_seconds += expected_seconds
        return AudioReservation(expected_seconds)

    def release(self, key: Key, reservation: AudioReservation) -> None:
        """End a request and release what is left of its reservation."""
        usage = self._usage_of(key)
        usage.in_flight -= 1
        usage.reserved_seconds -= reservation.seconds
        reservation.seconds = 0.0

    def record_audio(self, key: Key, seconds: float, reservation: AudioReservation | None = None) -> None:
        """Count audio that was sent; it uses up the reservation of its request first."""
        usage, reservation = self._usage_of(key), reservation or AudioReservation()
        settled = min(seconds, reservation.seconds)
        reservation.seconds -= settled
        usage.reserved_seconds -= settled
        usage.audio_seconds += seconds

    def _check_quota(self, usage: KeyUsage, limit: float, expected_seconds: float) -> None:
        """Raise QuotaExceeded unless the request fits, or some quota is left and no other request is in flight.

        So a key can use its whole quota, and exceeds it by at most one request, even if it sends many at once.
        """
        if usage.audio_seconds >= limit:
            message = f"this key has used its {limit:g} seconds of audio for today (UTC)"
            raise QuotaExceeded(message, self._seconds_to_midnight())
        if usage.in_flight and usage.audio_seconds + usage.reserved_seconds + expected_seconds > limit:
            raise QuotaExceeded(
                f"this key may use {limit:g} seconds of audio a day (UTC), and its requests in flight need the rest: "
                "wait until they have ended",
                1.0,
            )

    def daily_audio(self) -> dict[str, DailyAudio]:
        """Return the usage of the keys that have a daily limit, by key name."""
        limited = {name: each for name, each in self._usage.items() if each.has_quota and each.audio_seconds}
        return {name: DailyAudio(each.day, each.audio_seconds) for name, each in limited.items()}

    def restore(self, used: Mapping[str, DailyAudio]) -> None:
        for name, each in used.items():
            self._usage[name] = KeyUsage(
                math.inf, self._clock(), day=each.day, audio_seconds=each.seconds, has_quota=True
            )

    def _usage_of(self, key: Key) -> KeyUsage:
        limits = self.limits_for(key)
        usage = self._usage.get(key.name)
        if usage is None:
            usage = self._usage[key.name] = KeyUsage(float(limits.requests_per_minute or 0), self._clock())
        usage.has_quota = limits.daily_audio_seconds is not None
        today = self._now().date().isoformat()
        if usage.day != today:
            usage.day, usage.audio_seconds = today, 0.0
        return usage

    def _seconds_to_midnight(self) -> float:
        now = self._now()
        midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
        return (midnight - now).total_seconds()


class UsageFile:
    """Daily usage as a JSON file. Owned by one server: two that share it would overwrite each other's counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, DailyAudio]:
        """Return the stored usage; a missing file is empty, and a broken one is logged and treated as empty."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            keys = stored["keys"].items()
            return {str(name): DailyAudio(str(each["day"]), float(each["seconds"])) for name, each in keys}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            logger.warning(
                "%s is not a usage file, counting daily audio from zero: %s", self.path, describe_error(problem)
            )
            return {}

    def write(self, used: dict[str, DailyAudio]) -> None:
        """Replace the file atomically. Raises OutputError."""
        keys = {name: {"day": each.day, "seconds": round(each.seconds, 3)} for name, each in used.items()}
        with output_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.path, (json.dumps({"keys": keys}, indent=2) + "\n").encode(), private=True)


class UsageRecorder:
    """Restores the tracker from the file at start, and saves changes while the server runs."""

    def __init__(self, tracker: KeyUsageTracker, file: UsageFile) -> None:
        self._tracker, self._file = tracker, file
        tracker.restore(file.read())
        self._saved = tracker.daily_audio()

    async def run(self) -> None:
        """Save every few seconds until the task is cancelled."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Write the file if anything changed. A write error is logged; requests are not affected."""
        used = self._tracker.daily_audio()
        if used == self._saved:
            return
        try:
            await asyncio.to_thread(self._file.write, used)
            self._saved = used
        except ShoalError as problem:
            logger.warning("%s", problem)
