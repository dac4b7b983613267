"""What each key may use, and how many requests may be under way at all."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from shoal.api.config import KeyLimits
from shoal.api.exceptions import QuotaExceeded, RateLimited
from shoal.errors import EngineBusy
from shoal.server.keys import Key

Clock = Callable[[], float]
Today = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class Usage:
    """What one key has used. Requests drain from a bucket that fills again within a minute."""

    tokens: float
    filled: float
    running: int = 0
    day: str = ""
    seconds: float = 0.0
    limited: bool = False  # by the day


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of audio on a day (UTC, ISO)."""

    day: str
    seconds: float


class Meters:
    """The usage of every key. `spent` and `restore` carry the day's audio over a restart."""

    def __init__(self, usual: KeyLimits, clock: Clock = time.monotonic, now: Today = utc_now) -> None:
        self._usual, self._clock, self._now = usual, clock, now
        self._usage: dict[str, Usage] = {}

    def limits_of(self, key: Key) -> KeyLimits:
        """The key's own limits, and the usual ones where it has none."""
        own, usual = key.limits, self._usual
        return KeyLimits(
            own.requests_per_minute or usual.requests_per_minute,
            own.concurrency or usual.concurrency,
            own.daily_audio_seconds or usual.daily_audio_seconds,
        )

    def count_request(self, key: Key) -> None:
        """Raises RateLimited when a key asks too often."""
        most = self.limits_of(key).requests_per_minute
        if most is None:
            return
        usage, now = self._of(key), self._clock()
        usage.tokens = min(most, usage.tokens + (now - usage.filled) * most / 60)
        usage.filled = now
        if usage.tokens < 1:
            raise RateLimited(f"this key may send {most} requests a minute", (1 - usage.tokens) * 60 / most)
        usage.tokens -= 1

    def begin(self, key: Key) -> None:
        """Count a speech of this key in. Raises RateLimited, QuotaExceeded."""
        limits, usage = self.limits_of(key), self._of(key)
        if limits.daily_audio_seconds is not None and usage.seconds >= limits.daily_audio_seconds:
            message = f"this key has had its {limits.daily_audio_seconds:g} seconds of audio for today (UTC)"
            raise QuotaExceeded(message, self._seconds_to_midnight())
        if limits.concurrency is not None and usage.running >= limits.concurrency:
            raise RateLimited(f"this key may have {limits.concurrency} requests under way at one time", 1.0)
        usage.running += 1

    def end(self, key: Key) -> None:
        self._of(key).running -= 1

    def count_audio(self, key: Key, seconds: float) -> None:
        self._of(key).seconds += seconds

    def spent(self) -> dict[str, Spent]:
        """Of the keys that have a daily limit, by name."""
        limited = {name: each for name, each in self._usage.items() if each.limited and each.seconds}
        return {name: Spent(each.day, each.seconds) for name, each in limited.items()}

    def restore(self, spent: Mapping[str, Spent]) -> None:
        for name, each in spent.items():
            self._usage[name] = Usage(math.inf, self._clock(), day=each.day, seconds=each.seconds, limited=True)

    def _of(self, key: Key) -> Usage:
        limits = self.limits_of(key)
        usage = self._usage.setdefault(key.name, Usage(float(limits.requests_per_minute or 0), self._clock()))
        usage.limited = limits.daily_audio_seconds is not None
        today = self._now().date().isoformat()
        if usage.day != today:
            usage.day, usage.seconds = today, 0.0
        return usage

    def _seconds_to_midnight(self) -> float:
        now = self._now()
        midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
        return (midnight - now).total_seconds()


@dataclass(slots=True)
class Backlog:
    """Requests under way. Past `capacity` new ones are refused, with the time after which one place will be free."""

    capacity: int
    slots: int
    running: int = 0
    usual_seconds: float = 2.0  # how long a request took lately

    def begin(self) -> None:
        if self.running >= self.capacity:
            raise EngineBusy(f"{self.running} requests are under way and the queue is full; try again later")
        self.running += 1

    def end(self, seconds: float) -> None:
        self.running -= 1
        self.usual_seconds += 0.1 * (seconds - self.usual_seconds)

    def wait_seconds(self) -> float:
        """After which a new request would find its turn come: the rounds before it, each as long as usual."""
        rounds = math.ceil((self.running + 1) / max(1, self.slots))
        return min(600.0, max(1.0, rounds * self.usual_seconds))
