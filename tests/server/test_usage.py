import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shoal.api.admission import Meters
from shoal.api.config import KeyLimits
from shoal.api.exceptions import QuotaExceeded
from shoal.server.keys import Key
from shoal.server.usage import UsageFile, UsageKeeper

ALICE = Key("alice", "", limits=KeyLimits(daily_audio_seconds=10))
BOB = Key("bob", "")


def meters(day: int = 1) -> Meters:
    return Meters(KeyLimits(requests_per_minute=60), clock=lambda: 0.0, now=lambda: datetime(2026, 1, day, tzinfo=UTC))


def used_up(file: UsageFile) -> Meters:
    before = meters()
    keeper = UsageKeeper(before, file)
    before.count_audio(ALICE, 11)
    before.count_audio(BOB, 11)
    asyncio.run(keeper.save())
    return before


def test_what_was_used_today_is_used_after_a_restart(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "state" / "usage.json")
    used_up(file)
    after = meters()
    UsageKeeper(after, file)
    with pytest.raises(QuotaExceeded):
        after.begin(ALICE)
    after.count_request(ALICE)
    after.begin(BOB)


def test_tomorrow_is_another_day(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "usage.json")
    used_up(file)
    tomorrow = meters(day=2)
    UsageKeeper(tomorrow, file)
    tomorrow.begin(ALICE)


@pytest.mark.parametrize("content", ["", "[]", '{"keys": {"alice": 3}}', '{"keys": {"alice": {"day": "x"}}}'])
def test_a_broken_file_counts_as_none(tmp_path: Path, content: str) -> None:
    file = UsageFile(tmp_path / "usage.json")
    file.path.write_text(content)
    assert file.read() == {}
    used_up(file)
    assert file.read().keys() == {"alice"}


def test_a_disk_that_refuses_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("a file where a directory should be")
    used_up(UsageFile(tmp_path / "state" / "usage.json"))
    assert "cannot write" in caplog.text


def test_without_quotas_nothing_is_written(tmp_path: Path) -> None:
    file, counts = UsageFile(tmp_path / "usage.json"), meters()
    keeper = UsageKeeper(counts, file)
    counts.count_audio(BOB, 11)
    asyncio.run(keeper.save())
    assert not file.path.exists()
