import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shoal.api.admission import Backlog, Meters
from shoal.api.config import KeyLimits, ServerConfig
from shoal.api.exceptions import QuotaExceeded, RateLimited
from shoal.errors import EngineBusy, InvalidRequest, OutputError
from shoal.server.keys import Key, KeyFile, KeyRing, chosen_key
from shoal.server.state import key_ring


def test_a_key_is_kept_as_a_hash_and_opens_the_door(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "deep" / "keys.json")
    assert file.read() == []
    secret = file.new("alice", KeyLimits(concurrency=2))
    file.new("bob")
    assert secret not in file.path.read_text()
    assert file.path.stat().st_mode & 0o777 == 0o600
    ring = KeyRing(file.read())
    owner = ring.owner(secret)
    assert owner is not None
    assert (owner.name, owner.limits.concurrency) == ("alice", 2)
    assert ring.owner(secret[:-1]) is None
    assert ring.owner("\ud800") is None
    file.revoke("alice")
    assert KeyRing(file.read()).owner(secret) is None


def test_a_file_without_a_key_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key_ring(ServerConfig(keys_file=tmp_path / "keys.json"))
    assert "there is no key in" in caplog.text
    caplog.clear()
    KeyFile(tmp_path / "keys.json").new("alice")
    assert len(key_ring(ServerConfig(keys_file=tmp_path / "keys.json"))) == 1
    assert not caplog.text


def test_wrong_files_and_names_are_refused(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.new("alice")
    with pytest.raises(InvalidRequest, match="already"):
        file.new("alice")
    with pytest.raises(InvalidRequest, match="no key named"):
        file.revoke("bob")
    file.path.write_text('{"keys": [{"name": "x"}]}')
    with pytest.raises(InvalidRequest, match="not a file of keys"):
        file.read()


def test_keys_that_are_made_and_revoked_at_one_time_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = KeyFile(tmp_path / "keys.json"), KeyFile.read
    file.new("old")

    def slowly(self: KeyFile) -> list[Key]:
        keys = read(self)
        time.sleep(0.05)  # who else reads now would write without what we are about to
        return keys

    monkeypatch.setattr(KeyFile, "read", slowly)
    with ThreadPoolExecutor(7) as pool:
        changes = [pool.submit(KeyFile(file.path).new, f"user{number}") for number in range(6)]
        changes.append(pool.submit(KeyFile(file.path).revoke, "old"))
        for change in changes:
            change.result()
    assert {key.name for key in read(file)} == {f"user{number}" for number in range(6)}


def test_keys_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*keys\.json"):
        KeyFile(tmp_path / "file" / "keys.json").new("alice")


def test_a_key_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 16"):
        chosen_key(1, "password", KeyLimits())


class Time:
    now = 0.0
    day = datetime(2030, 1, 1, 18, tzinfo=UTC)


def meters(**limits: float) -> tuple[Meters, Key]:
    usual = KeyLimits(**limits)  # type: ignore[arg-type]
    return Meters(usual, clock=lambda: Time.now, now=lambda: Time.day), Key("alice", "0" * 64)


def test_a_key_may_send_so_many_requests_a_minute() -> None:
    counting, key = meters(requests_per_minute=2)
    counting.count_request(key)
    counting.count_request(key)
    with pytest.raises(RateLimited) as refused:
        counting.count_request(key)
    assert refused.value.retry_after == pytest.approx(30.0)
    Time.now += 30.0
    counting.count_request(key)


def test_a_key_may_have_so_many_under_way() -> None:
    counting, key = meters(concurrency=1)
    counting.begin(key)
    with pytest.raises(RateLimited):
        counting.begin(key)
    counting.end(key)
    counting.begin(key)


def test_the_audio_of_a_day_ends_at_midnight() -> None:
    counting, key = meters(daily_audio_seconds=10)
    counting.begin(key)
    counting.count_audio(key, 11.0)
    with pytest.raises(QuotaExceeded) as refused:
        counting.begin(key)
    assert refused.value.retry_after == 6 * 3600
    Time.day = datetime(2030, 1, 2, 1, tzinfo=UTC)
    counting.begin(key)


def test_a_keys_own_limits_go_before_the_usual_ones() -> None:
    counting, _ = meters(concurrency=1)
    own = Key("bob", "1" * 64, limits=KeyLimits(concurrency=2))
    counting.begin(own)
    counting.begin(own)


def test_the_backlog_says_how_long_to_stay_away() -> None:
    backlog = Backlog(capacity=12, slots=4)
    for _ in range(12):
        backlog.begin()
    assert backlog.wait_seconds() == pytest.approx(4 * backlog.usual_seconds)
    with pytest.raises(EngineBusy):
        backlog.begin()
    for _ in range(12):
        backlog.end(10.0)
    assert backlog.running == 0
    assert 2.0 < backlog.usual_seconds < 10.0
