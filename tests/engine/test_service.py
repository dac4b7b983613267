"""Which requests are prepared on the calling thread, and which on another."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.load import voice_cache
from shoal.engine.process.jobs import JobRunner
from shoal.engine.process.messages import Speak
from shoal.engine.process.worker import EngineWorker
from shoal.engine.service import SHORT_TEXT, Service
from shoal.errors import TextError
from shoal.speech import AudioChunk, Pronunciation, Recording, Sampling, SpeechRequest
from shoal.text.plan import TextPlan
from tests.engine.test_engine import recording

HELLO = SpeechRequest("Hello there.")


@pytest.fixture
def service(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr("shoal.voices.store.is_local", lambda path: True)
    core = EngineCore(tiny, EngineConfig(slots=2, guard=False))
    made = Service(core, voice_cache(tiny, tmp_path / "voices"))
    yield made
    made.close()


@pytest.fixture
def planners(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that planned requests."""
    threads, plan = list[str](), service.plan

    def note(request: SpeechRequest) -> TextPlan:
        threads.append(threading.current_thread().name)
        return plan(request)

    monkeypatch.setattr(service, "plan", note)
    return threads


def test_short_requests_are_prepared_inline_only_if_the_caller_says_so(service: Service, planners: list[str]) -> None:
    asyncio.run(service.prepare(HELLO, inline=True))
    asyncio.run(service.prepare(HELLO))
    here, other = planners
    assert here == threading.current_thread().name != other


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(SpeechRequest("Hello. " * (SHORT_TEXT // 7 + 1)), id="long text"),
        pytest.param(SpeechRequest("Hello.", recordings=(Recording(recording(), "words"),)), id="recordings"),
        pytest.param(SpeechRequest("Hello.", lexicon=(Pronunciation("Hello", "hallo"),)), id="lexicon"),
    ],
)
def test_others_are_prepared_on_another_thread(given: SpeechRequest, service: Service, planners: list[str]) -> None:
    asyncio.run(service.prepare(given, inline=True))
    assert planners[0] != threading.current_thread().name


def test_looking_up_a_voice_over_a_network_blocks_no_event_loop(
    service: Service, planners: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.voices._store, "local", False)
    asyncio.run(service.prepare(HELLO, inline=True))
    assert planners[0] != threading.current_thread().name


def test_errors_of_inline_requests_reach_the_caller(service: Service, planners: list[str]) -> None:
    with pytest.raises(TextError):
        asyncio.run(service.prepare(SpeechRequest("   "), inline=True))
    assert planners == [threading.current_thread().name]


def test_an_engine_process_prepares_short_requests_on_the_event_loop_of_its_jobs(
    service: Service, planners: list[str]
) -> None:
    worker, ended = object.__new__(EngineWorker), threading.Event()
    worker._service, worker._jobs = service, JobRunner(1)

    def send(_: int, reply: object) -> None:
        assert isinstance(reply, AudioChunk)
        if reply.finish is not None:
            ended.set()

    worker._send = send
    request = SpeechRequest("Hello.", sampling=Sampling(max_frames=2))
    worker._run_command(7, Speak(request, None))
    assert ended.wait(240)
    assert planners == ["shoal-jobs"]
