from collections import deque

from shoal.cluster.replica_stats import MAX_VOICES, ReplicaStats, RequestOutcome, percentiles
from shoal.speech import SpeechRequest


def test_the_most_recent_voices_are_kept() -> None:
    stats = ReplicaStats()
    for number in range(MAX_VOICES + 10):
        stats.record_first_audio(SpeechRequest("Hi.", voice=f"v{number}"), 0.1)
    stats.record_first_audio(SpeechRequest("Hi.", voice="v20"), 0.1)
    stats.record_first_audio(SpeechRequest("Hi."), 0.1)
    assert len(stats.voices) == MAX_VOICES
    assert list(stats.voices)[-2:] == [f"name:v{MAX_VOICES + 9}", "name:v20"]
    assert "name:v9" not in stats.voices


def test_requests_are_counted_by_outcome() -> None:
    stats = ReplicaStats()
    for outcome in (
        RequestOutcome.COMPLETED,
        RequestOutcome.FAILED,
        RequestOutcome.CANCELLED,
        RequestOutcome.COMPLETED,
    ):
        stats.start_request()
        stats.end_request(1.0, outcome)
    stats.start_request()
    assert (stats.requests, stats.in_flight, stats.failed, stats.cancelled) == (5, 1, 1, 1)
    assert list(stats.whole) == [1.0, 1.0]


def test_latencies_are_summarized_as_percentiles() -> None:
    assert percentiles(deque()) is None
    assert percentiles(deque([0.5])) == {"p50": 0.5, "p95": 0.5}
    assert percentiles(deque(number / 100 for number in range(101))) == {"p50": 0.5, "p95": 0.95}
