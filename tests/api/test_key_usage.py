import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shoal.api.config import KeyLimits
from shoal.api.exceptions import QuotaExceeded, RateLimited
from shoal.api.key_usage import KeyUsageTracker, UsageFile, UsageRecorder
from shoal.api.keys import Key

ALICE = Key("alice", "", limits=KeyLimits(daily_audio_seconds=10))
BOB = Key("bob", "")


class FakeClock:
    now = 0.0
    day = datetime(2030, 1, 1, 18, tzinfo=UTC)


def tracker_with(**limits: float) -> tuple[KeyUsageTracker, Key, FakeClock]:
    clock, defaults = FakeClock(), KeyLimits(**limits)  # type: ignore[arg-type]
    return KeyUsageTracker(defaults, clock=lambda: clock.now, now=lambda: clock.day), Key("alice", "0" * 64), clock


def test_the_request_rate_of_a_key_is_limited() -> None:
    tracker, key, clock = tracker_with(requests_per_minute=2)
    tracker.count_request(key)
    tracker.count_request(key)
    with pytest.raises(RateLimited) as rejected:
        tracker.count_request(key)
    assert rejected.value.retry_after == pytest.approx(30.0)
    clock.now += 30.0
    tracker.count_request(key)


def test_the_concurrency_of_a_key_is_limited() -> None:
    tracker, key, _ = tracker_with(concurrency=1)
    reservation = tracker.acquire(key)
    with pytest.raises(RateLimited):
        tracker.acquire(key)
    tracker.release(key, reservation)
    tracker.acquire(key)


def test_the_daily_quota_is_reset_at_midnight() -> None:
    tracker, key, clock = tracker_with(daily_audio_seconds=10)
    tracker.acquire(key)
    tracker.record_audio(key, 11.0)
    with pytest.raises(QuotaExceeded) as rejected:
        tracker.acquire(key)
    assert rejected.value.retry_after == 6 * 3600
    clock.day = datetime(2030, 1, 2, 1, tzinfo=UTC)
    tracker.acquire(key)


def test_a_reservation_is_settled_by_the_audio_that_was_sent() -> None:
    tracker, key, _ = tracker_with(daily_audio_seconds=10)
    first, second = tracker.acquire(key, 5.0), tracker.acquire(key, 4.0)
    with pytest.raises(QuotaExceeded) as rejected:
        tracker.acquire(key, 2.0)
    assert rejected.value.retry_after < 60, "not midnight: a request in flight may turn out shorter"
    tracker.record_audio(key, 2.0, first)
    tracker.release(key, first)
    tracker.acquire(key, 3.0)
    tracker.record_audio(key, 6.0, second)  # longer than expected
    tracker.release(key, second)
    with pytest.raises(QuotaExceeded):
        tracker.acquire(key, 1.0)


def test_limits_of_a_key_override_the_defaults() -> None:
    tracker, _, _ = tracker_with(concurrency=1)
    own = Key("bob", "1" * 64, limits=KeyLimits(concurrency=2))
    tracker.acquire(own)
    tracker.acquire(own)


def tracker_on(day: int = 1) -> KeyUsageTracker:
    now = datetime(2026, 1, day, tzinfo=UTC)
    return KeyUsageTracker(KeyLimits(requests_per_minute=60), clock=lambda: 0.0, now=lambda: now)


def save_usage(file: UsageFile) -> None:
    """Use more than Alice's quota, and save it."""
    tracker = tracker_on()
    recorder = UsageRecorder(tracker, file)
    tracker.record_audio(ALICE, 11)
    tracker.record_audio(BOB, 11)
    asyncio.run(recorder.save())


def test_daily_usage_survives_a_restart(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "state" / "usage.json")
    save_usage(file)
    after = tracker_on()
    UsageRecorder(after, file)
    with pytest.raises(QuotaExceeded):
        after.acquire(ALICE)
    after.count_request(ALICE)
    after.acquire(BOB)


def test_stored_usage_of_yesterday_does_not_count(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "usage.json")
    save_usage(file)
    tomorrow = tracker_on(day=2)
    UsageRecorder(tomorrow, file)
    tomorrow.acquire(ALICE)


@pytest.mark.parametrize("content", ["", "[]", '{"keys": {"alice": 3}}', '{"keys": {"alice": {"day": "x"}}}'])
def test_a_broken_usage_file_is_treated_as_empty(tmp_path: Path, content: str) -> None:
    file = UsageFile(tmp_path / "usage.json")
    file.path.write_text(content)
    assert file.read() == {}
    save_usage(file)
    assert file.read().keys() == {"alice"}


def test_a_failed_write_of_the_usage_file_is_logged_and_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file where a directory should be")
    save_usage(UsageFile(tmp_path / "state" / "usage.json"))
    assert "cannot write" in caplog.text


def test_usage_of_keys_without_quota_is_not_written(tmp_path: Path) -> None:
    file, tracker = UsageFile(tmp_path / "usage.json"), tracker_on()
    recorder = UsageRecorder(tracker, file)
    tracker.record_audio(BOB, 11)
    asyncio.run(recorder.save())
    assert not file.path.exists()
