"""Routing strategies: who speaks a request."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.routing import STRATEGIES, Candidate, check_strategy, make_strategy, voice_key
from shoal.errors import InvalidRequest
from shoal.speech import Recording, SpeechRequest


def candidates(*loads: int, slots: int = 4) -> list[Candidate]:
    return [Candidate(f"replica-{number}", load, slots) for number, load in enumerate(loads)]


def homes(count: int, voices: int = 200) -> dict[str, str]:
    """The home of each of many voices when there are `count` idle replicas."""
    strategy, idle = make_strategy("voice-affinity"), candidates(*[0] * count)
    return {f"voice-{number}": strategy.order(f"voice-{number}", idle)[0].id for number in range(voices)}


@pytest.mark.parametrize("name", STRATEGIES)
@given(loads=st.lists(st.integers(0, 8), max_size=8), voice=st.none() | st.text(max_size=8))
def test_every_replica_is_offered_once(name: str, loads: list[int], voice: str | None) -> None:
    offered = make_strategy(name).order(voice, candidates(*loads))
    assert sorted(each.id for each in offered) == sorted(each.id for each in candidates(*loads))


def test_round_robin_takes_each_in_its_turn() -> None:
    strategy = make_strategy("round-robin")
    firsts = [strategy.order(None, candidates(9, 0, 5))[0].id for _ in range(6)]
    assert firsts == ["replica-0", "replica-1", "replica-2"] * 2


def test_least_connections_takes_the_lowest_load_and_rotates_among_equals() -> None:
    strategy = make_strategy("least-connections")
    assert [each.load for each in strategy.order(None, candidates(3, 1, 2))] == [1, 2, 3]
    firsts = Counter(strategy.order(None, candidates(1, 1, 1))[0].id for _ in range(9))
    assert set(firsts.values()) == {3}


def test_a_voice_stays_on_its_replica_while_that_has_a_slot() -> None:
    home = homes(4)["voice-0"]
    busy = [Candidate(each.id, 3 if each.id == home else 0, 4) for each in candidates(0, 0, 0, 0)]
    assert make_strategy("voice-affinity").order("voice-0", busy)[0].id == home


def test_a_voice_spills_over_to_its_own_second_replica() -> None:
    strategy = make_strategy("voice-affinity")
    first, second, *_ = strategy.order("voice-0", candidates(0, 0, 0, 0))
    full = [Candidate(each.id, 4 if each.id == first.id else 3, 4) for each in candidates(0, 0, 0, 0)]
    assert strategy.order("voice-0", full)[0].id == second.id
    assert strategy.order("voice-0", full)[-1].id == first.id


def test_when_all_are_full_the_lowest_load_is_next() -> None:
    assert make_strategy("voice-affinity").order("voice-0", candidates(9, 6, 7))[0].id == "replica-1"


def test_a_request_without_a_voice_goes_to_the_least_loaded_replica() -> None:
    assert make_strategy("voice-affinity").order(None, candidates(2, 1, 3))[0].id == "replica-1"


def test_voices_spread_over_the_replicas() -> None:
    share = Counter(homes(4).values())
    assert len(share) == 4
    assert max(share.values()) < 2 * min(share.values())


def test_only_the_voices_of_a_lost_replica_move() -> None:
    before, after = homes(5), homes(4)  # the fifth is gone
    moved = {voice for voice in before if before[voice] != after[voice]}
    assert moved == {voice for voice, home in before.items() if home == "replica-4"}


def test_a_voice_is_known_by_its_name_or_by_the_content_of_its_recordings() -> None:
    hello, other = Recording(b"abc", "hello"), Recording(b"abc", "other")
    key = voice_key(SpeechRequest("Hi.", recordings=(hello,)))
    assert key == voice_key(SpeechRequest("Other words.", recordings=(Recording(b"abc", "hello"),)))
    assert key != voice_key(SpeechRequest("Hi.", recordings=(other,)))
    assert key != voice_key(SpeechRequest("Hi.", recordings=(Recording(b"abch", "ello"),)))
    assert voice_key(SpeechRequest("Hi.", voice="a")) == voice_key(SpeechRequest("Ho.", voice="a"))
    assert voice_key(SpeechRequest("Hi.", voice="a")) != voice_key(SpeechRequest("Hi.", voice="b"))
    assert voice_key(SpeechRequest("Hi.")) is None
    assert voice_key(SpeechRequest("Hi.", voice="alloy", fallback_voices=("a",))) == voice_key(
        SpeechRequest("Hi.", voice="a")
    )
    assert voice_key(SpeechRequest("Hi.", voice="alloy", fallback_voices=(None,))) is None


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="round-robin, least-connections, voice-affinity"):
        check_strategy("random")
