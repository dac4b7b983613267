from collections import deque

from shoal.cluster.replica_stats import REMEMBERED_VOICES, ReplicaStats, RequestOutcome, percentiles
from shoal.speech import SpeechRequest


def test_the_voices_heard_last_are_remembered() -> None:
    stats = ReplicaStats()
    for number in range(REMEMBERED_VOICES + 10):
        stats.record_first_audio(SpeechRequest("Hi.", voice=f"v{number}"), 0.1)
    stats.record_first_audio(SpeechRequest("Hi.", voice="v20"), 0.1)
    stats.record_first_audio(SpeechRequest("Hi."), 0.1)
    assert len(stats.voices) == REMEMBERED_VOICES
    assert list(stats.voices)[-2:] == [f"name:v{REMEMBERED_VOICES + 9}", "name:v20"]
    assert "name:v9" not in stats.voices


def test_speeches_are_counted_by_how_they_end() -> None:
    stats = ReplicaStats()
    for how in (RequestOutcome.COMPLETED, RequestOutcome.FAILED, RequestOutcome.CANCELLED, RequestOutcome.COMPLETED):
        stats.start_request()
        stats.end_request(1.0, how)
    stats.start_request()
    assert (stats.requests, stats.in_flight, stats.failed, stats.cancelled) == (5, 1, 1, 1)
    assert list(stats.whole) == [1.0, 1.0]


def test_latencies_have_a_middle_and_a_slow_end() -> None:
    assert percentiles(deque()) is None
    assert percentiles(deque([0.5])) == {"p50": 0.5, "p95": 0.5}
    assert percentiles(deque(number / 100 for number in range(101))) == {"p50": 0.5, "p95": 0.95}
