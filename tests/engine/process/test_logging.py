"""Log records of a real engine process, as the parent process handles them."""

import asyncio
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import pytest

from shoal.config import EngineConfig
from shoal.engine.process.logging import ForwardingHandler, current_job, job_of, write_line
from shoal.engine.process.messages import LogLine
from shoal.engine.process.supervisor import Supervisor
from tests.engine.process.test_supervisor import collect, short
from tests.engine.rigged import RiggedSource, reject_the_first
from tests.waiting import wait_until

asking: ContextVar[str] = ContextVar("asking", default="nobody")


class Received(logging.Handler):
    """Collects log lines with the caller of their context."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.name, record.getMessage(), asking.get()))


@pytest.fixture
def received() -> Iterator[Received]:
    handler, shoal = Received(), logging.getLogger("shoal")
    before = shoal.level
    shoal.addHandler(handler)
    shoal.setLevel(logging.INFO)
    yield handler
    shoal.removeHandler(handler)
    shoal.setLevel(before)


@pytest.mark.usefixtures("forked_engines")
def test_engine_log_records_are_forwarded_with_the_parents_level_and_request_id(
    received: Received, tmp_path: Path
) -> None:
    config = EngineConfig(slots=2)
    supervisor = Supervisor(RiggedSource("nano", "cpu", config=config, voices=tmp_path, rig=reject_the_first))
    supervisor.start()
    asking.set("anna")
    asyncio.run(collect(supervisor, short(1)))
    asking.set("nobody")
    wait_until(lambda: any("retrying with another seed" in message for _, message, _ in received.lines))
    supervisor.close()
    [weights] = [line for line in received.lines if line[1].startswith("weights: ")]
    assert weights[::2] == ("shoal.engine.load", "nobody")
    [again] = [line for line in received.lines if "retrying with another seed" in line[1]]
    assert again[::2] == ("shoal.engine.request_tracker", "anna")


def record(message: str, *given: object, job: int | None = None, problem: Exception | None = None) -> logging.LogRecord:
    exc_info = None if problem is None else (type(problem), problem, problem.__traceback__)
    made = logging.LogRecord("shoal.somewhere", logging.WARNING, "", 0, message, given, exc_info)
    if job is not None:
        made.job = job
    return made


def test_a_log_line_belongs_to_the_job_of_its_extra_or_of_the_context() -> None:
    assert job_of(record("utterance %d: %s", 7, "silent", job=7)) == 7
    assert job_of(record("the device is warm")) == 0
    token = current_job.set(3)
    assert job_of(record("job %d failed", 3)) == 3
    current_job.reset(token)


def test_tracebacks_are_forwarded(received: Received) -> None:
    sent: list[tuple[int, LogLine]] = []
    handler = ForwardingHandler(lambda job, line: sent.append((job, line)))
    handler.handle(record("utterance %d broke", 7, job=7, problem=ValueError("why")))
    [(job, line)] = sent
    assert job == 7
    assert (line.logger, line.level, line.message) == ("shoal.somewhere", logging.WARNING, "utterance 7 broke")
    assert line.traceback is not None
    assert "ValueError: why" in line.traceback
    write_line(line)
    assert received.lines == [("shoal.somewhere", "utterance 7 broke", "nobody")]


def test_lines_below_the_parents_level_are_dropped(received: Received) -> None:
    write_line(LogLine("shoal.somewhere", logging.DEBUG, "detail", None))
    assert not received.lines
