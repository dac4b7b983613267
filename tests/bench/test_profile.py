import json

import pytest

from shoal.bench import profile
from shoal.bench.profile import Part, Profile


def test_every_part_of_a_request_is_timed_and_the_largest_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SECONDS", 0.0)
    monkeypatch.setattr(profile, "FRAMES", 4)
    told = json.loads(profile.run_profile("random:tiny", device="cpu", voices=2).as_json())
    assert [part["name"] for part in told["parts"]] == [
        "tokenize", "prefill", "slow step", "fast steps", "sampling", "codec", "encode", "host gaps"
    ]  # fmt: skip
    assert set(told["steps"]) == {"1", "2"}
    assert told["ceiling"] > 0
    assert len(told["bottlenecks"]) == 3


def test_what_is_done_once_per_step_is_shared_by_the_voices() -> None:
    parts = [Part("prefill", 10.0, "request"), Part("codec", 4.0, "step", bytes_read=8_000_000)]
    told = Profile("m", {"device": "d", "torch": "t"}, "eager", 64, 1e9, parts, {1: 1.0})
    assert [part.name for part in told.bottlenecks] == ["prefill", "codec"]
    assert parts[1].of_request(64) == 4.0 * profile.FRAMES / 64
    assert parts[1].bandwidth() == 2e9
