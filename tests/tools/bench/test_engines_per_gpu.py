"""Several engine processes on one device: their figures taken together."""

import pytest

from scripts.engines_per_gpu import together


def test_the_slowest_engine_ends_the_measurement() -> None:
    fast = {"audio_seconds": 30.0, "seconds": 2.0, "utterances": 6, "waits": [0.1, 0.3], "memory": 5}
    slow = {"audio_seconds": 10.0, "seconds": 4.0, "utterances": 2, "waits": [0.2], "memory": 7}
    found = together([fast, slow])
    assert (found["audio_per_second"], found["requests_per_second"]) == (10.0, 2.0)
    assert found["first_audio"]["p50"] == pytest.approx(0.2)
    assert found["memory"] == [5, 7]
