"""Which requests are prepared on the calling thread, and which on another."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.load import voice_cache
from shoal.engine.service import SHORT_TEXT, SLOW_PAUSE, SLOW_SECONDS, Service
from shoal.errors import TextError
from shoal.speech import Recording, SpeechRequest
from shoal.text.plan import TextPlan
from tests.engine.clock import FakeClock
from tests.engine.test_engine import recording

Plan = Callable[[SpeechRequest], TextPlan]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def service(tiny: Checkpoint, tmp_path: Path, clock: FakeClock) -> Iterator[Service]:
    core = EngineCore(tiny, EngineConfig(slots=2, guard=False), clock)
    made = Service(core, voice_cache(tiny, tmp_path / "voices"))
    yield made
    made.close()


def planned_here(
    service: Service, request: SpeechRequest, monkeypatch: pytest.MonkeyPatch, *, inline: bool = True
) -> bool:
    """Return whether a request is prepared on the calling thread."""
    threads, plan = list[int](), service.plan

    def note(request: SpeechRequest) -> TextPlan:
        threads.append(threading.get_ident())
        return plan(request)

    with monkeypatch.context() as patch:
        patch.setattr(service, "plan", note)
        asyncio.run(service.prepare(request, inline=inline))
    [thread] = threads
    return thread == threading.get_ident()


def test_short_requests_are_prepared_inline_only_if_the_caller_says_so(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = SpeechRequest("Hello there.")
    assert planned_here(service, request, monkeypatch)
    assert not planned_here(service, request, monkeypatch, inline=False)


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(SpeechRequest("Hello. " * (SHORT_TEXT // 7 + 1)), id="long text"),
        pytest.param(SpeechRequest("Hello.", recordings=(Recording(recording(), "words"),)), id="recordings"),
    ],
)
def test_others_are_prepared_on_another_thread(
    request_: SpeechRequest, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not planned_here(service, request_, monkeypatch)


@pytest.mark.parametrize(("seconds", "inline"), [(SLOW_SECONDS / 2, True), (2 * SLOW_SECONDS, False)])
def test_after_a_slow_one_short_requests_use_other_threads_for_a_while(
    seconds: float, inline: bool, service: Service, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists, request = service.voices.exists, SpeechRequest("Hello.", voice="narrator", fallback_voices=(None,))

    def slow(name: str) -> bool:
        clock.now += seconds
        return exists(name)

    with monkeypatch.context() as patch:
        patch.setattr(service.voices, "exists", slow)
        assert planned_here(service, request, monkeypatch)
    assert planned_here(service, request, monkeypatch) == inline
    clock.now += SLOW_PAUSE
    assert planned_here(service, request, monkeypatch)


def test_errors_of_inline_requests_reach_the_caller(service: Service) -> None:
    with pytest.raises(TextError):
        asyncio.run(service.prepare(SpeechRequest("   "), inline=True))
