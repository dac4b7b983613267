import pytest

from shoal.api.admission import AdmissionQueue
from shoal.errors import EngineBusy


def test_a_full_queue_rejects_requests_and_estimates_when_to_retry() -> None:
    queue = AdmissionQueue(capacity=12, slots=4)
    for _ in range(12):
        queue.acquire()
    assert queue.retry_after_seconds() == pytest.approx(4 * queue.average_seconds)
    with pytest.raises(EngineBusy):
        queue.acquire()
    for _ in range(12):
        queue.release(10.0)
    assert queue.in_flight == 0
    assert 2.0 < queue.average_seconds < 10.0
