from collections import deque

from shoal.cluster.replica_stats import REMEMBERED_VOICES, Ending, Record, spread
from shoal.speech import SpeechRequest


def test_the_voices_heard_last_are_remembered() -> None:
    record = Record()
    for number in range(REMEMBERED_VOICES + 10):
        record.hear(SpeechRequest("Hi.", voice=f"v{number}"), 0.1)
    record.hear(SpeechRequest("Hi.", voice="v20"), 0.1)
    record.hear(SpeechRequest("Hi."), 0.1)
    assert len(record.voices) == REMEMBERED_VOICES
    assert list(record.voices)[-2:] == [f"name:v{REMEMBERED_VOICES + 9}", "name:v20"]
    assert "name:v9" not in record.voices


def test_speeches_are_counted_by_how_they_end() -> None:
    record = Record()
    for how in (Ending.SPOKEN, Ending.FAILED, Ending.LEFT, Ending.SPOKEN):
        record.begin()
        record.end(1.0, how)
    record.begin()
    assert (record.requests, record.in_flight, record.failed, record.left) == (5, 1, 1, 1)
    assert list(record.whole) == [1.0, 1.0]


def test_latencies_have_a_middle_and_a_slow_end() -> None:
    assert spread(deque()) is None
    assert spread(deque([0.5])) == {"p50": 0.5, "p95": 0.5}
    assert spread(deque(number / 100 for number in range(101))) == {"p50": 0.5, "p95": 0.95}
