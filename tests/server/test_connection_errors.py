"""Errors of connections without a status code: disconnects, errors for the client, and bugs."""

import asyncio
import logging

import pytest

from shoal.errors import InvalidRequest
from shoal.server.connection_errors import connection_errors


def serve(*errors: BaseException) -> list[str]:
    """Raise each error in a task of the connection's group; return what the client receives."""
    received: list[str] = []

    async def fail(error: BaseException) -> None:
        received.append(str(error))

    async def fail_internally() -> None:
        received.append("internal")

    async def raise_error(error: BaseException) -> None:
        raise error

    async def run() -> None:
        async with connection_errors("id", (OSError, EOFError), fail, fail_internally), asyncio.TaskGroup() as group:
            for error in errors:
                group.create_task(raise_error(error))

    asyncio.run(run())
    return received


def test_a_disconnect_is_not_reported_to_the_client(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shoal"):
        assert serve(EOFError(), ConnectionResetError()) == []
    assert caplog.messages == ["id: client disconnected"]


def test_the_client_gets_the_message_of_an_invalid_request() -> None:
    assert serve(InvalidRequest("no such event")) == ["no such event"]


def test_a_bug_is_logged_with_its_traceback_and_does_not_reach_the_client(caplog: pytest.LogCaptureFixture) -> None:
    assert serve(ZeroDivisionError("a bug")) == ["internal"]
    (record,) = caplog.records
    assert (record.message, record.levelno) == ("id: internal error", logging.ERROR)
    assert record.exc_info is not None


def test_a_shutdown_cancels_the_connection() -> None:
    async def run() -> None:
        started, received = asyncio.Event(), list[BaseException]()

        async def fail(error: BaseException) -> None:
            received.append(error)

        async def fail_internally() -> None:
            received.append(RuntimeError())

        async def serve_forever() -> None:
            async with connection_errors("id", OSError, fail, fail_internally), asyncio.TaskGroup():
                started.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(serve_forever())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert received == []

    asyncio.run(run())
