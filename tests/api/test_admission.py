from pathlib import Path

import numpy as np
import pytest

from shoal.api.accounting import RequestAccounting, expected_seconds
from shoal.api.admission import AdmissionQueue
from shoal.api.config import KeyLimits, ServerConfig
from shoal.api.engine_client import EngineHandle, EngineLifecycle
from shoal.api.exceptions import QuotaExceeded
from shoal.api.state import create_state
from shoal.errors import EngineBusy
from shoal.speech import AudioChunk, Sampling, SpeechRequest
from shoal.voices.store import VoiceStore
from tests.server.standin import Standin


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


def test_a_client_that_fills_the_queue_leaves_room_for_others() -> None:
    queue = AdmissionQueue(capacity=16, slots=4)
    for _ in range(12):
        queue.acquire("greedy", shared=True)
    with pytest.raises(EngineBusy, match="share"):
        queue.acquire("greedy", shared=True)
    for _ in range(3):
        queue.acquire("modest", shared=True)
    for _ in range(12):
        queue.release(1.0, "greedy")
    assert queue.by_client == {"modest": 3}, "clients without requests are forgotten"


def test_the_only_client_may_fill_the_queue() -> None:
    queue = AdmissionQueue(capacity=16, slots=4)
    for _ in range(16):
        queue.acquire("anyone")
    with pytest.raises(EngineBusy, match="full"):
        queue.acquire("anyone")


@pytest.mark.parametrize(("keys", "admitted"), [(("a" * 32,), 8), (("a" * 32, "b" * 32), 6)])
def test_keys_share_the_queue_when_there_are_several(keys: tuple[str, ...], admitted: int, tmp_path: Path) -> None:
    engine = EngineHandle(Standin(), VoiceStore(tmp_path), 25.0)
    state = create_state(ServerConfig(api_keys=keys, capacity=8), EngineLifecycle(lambda: engine, engine), 4)
    for _ in range(admitted):
        state.enter_queue(state.authenticate(f"Bearer {keys[0]}"))
    with pytest.raises(EngineBusy):
        state.enter_queue(state.authenticate(f"Bearer {keys[0]}"))
    if len(keys) > 1:
        state.enter_queue(state.authenticate(f"Bearer {keys[1]}"))


def test_parallel_requests_cannot_exceed_the_daily_quota_together(tmp_path: Path) -> None:
    engine = EngineHandle(Standin(), VoiceStore(tmp_path), 25.0)
    config = ServerConfig(api_keys=("a" * 32,), key_limits=KeyLimits(daily_audio_seconds=5.0))
    state = create_state(config, EngineLifecycle(lambda: engine, engine), 4)
    key = state.authenticate(f"Bearer {'a' * 32}")
    seconds = expected_seconds(SpeechRequest("A sentence that takes about four seconds to be spoken aloud."), 25.0)
    assert 3.0 < seconds < 6.0
    admitted = [RequestAccounting(state, "fish", key, "first", expected_seconds=seconds)]
    for number in range(15):
        with pytest.raises(QuotaExceeded, match="in flight"):
            RequestAccounting(state, "fish", key, f"{number}", expected_seconds=seconds)
    admitted[0].record_audio(AudioChunk(np.zeros(2 * 16_000, np.float32), 16_000))
    admitted[0].finish()
    RequestAccounting(state, "fish", key, "last", expected_seconds=seconds).finish()


def test_an_estimate_is_bounded_by_the_maximum_number_of_frames() -> None:
    request = SpeechRequest("word " * 100, sampling=Sampling(max_frames=50))
    assert expected_seconds(request, 25.0) == 2.0
    assert expected_seconds(SpeechRequest("你好吗"), 25.0) > 2 * expected_seconds(SpeechRequest("abc"), 25.0) - 1.0
