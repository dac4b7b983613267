"""An exception that is not ours reaches no client: a fixed message, not retryable, and the cause in the log."""

import logging
from types import SimpleNamespace

import pytest

from shoal.engine.process.messages import Failed
from shoal.engine.process.worker import EngineWorker
from shoal.errors import InternalError
from shoal.server.error_responses import status_of


def test_the_text_of_an_internal_exception_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[tuple[int, object]] = []
    worker = EngineWorker.__new__(EngineWorker)  # without an engine: only how a job's error is reported
    worker._send = lambda job, reply: sent.append((job, reply))
    worker._service = SimpleNamespace(device_responds=lambda: True)  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR), worker._reporting_errors(7):
        raise OSError("/srv/secret/path is not a directory")
    ((job, reply),) = sent
    assert isinstance(reply, Failed)
    assert (job, type(reply.error), status_of(reply.error)) == (7, InternalError, 500)
    assert "secret" not in str(reply.error)
    assert "/srv/secret/path" in caplog.text
