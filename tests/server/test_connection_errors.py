"""Errors of connections without a status code: disconnects, errors for the client, and bugs."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from starlette.types import Message
from starlette.websockets import WebSocket

from shoal.api.config import Limits
from shoal.api.keys import ANONYMOUS
from shoal.api.live.elevenlabs import stream_options
from shoal.errors import InvalidRequest
from shoal.server.app import create_app
from shoal.server.connection_errors import connection_errors
from shoal.server.routes.elevenlabs.live import ElevenLabsSocket
from shoal.speech import AudioChunk, SpeechRequest
from tests.server.standin import Standin, state_with


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


class Chorus(Standin):
    """Begins all requests in the same step of the event loop, when there are `voices` of them."""

    def __init__(self, voices: int) -> None:
        super().__init__()
        self.go_on.set()
        self._barrier = asyncio.Barrier(voices)

    async def speak(self, request: SpeechRequest, deadline: float | None = None) -> AsyncGenerator[AudioChunk, None]:
        await self._barrier.wait()
        async for chunk in super().speak(request, deadline):
            yield chunk


def test_a_client_that_goes_while_several_contexts_speak_is_no_internal_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first failed send closes the socket; the other contexts find it closed."""
    texts = [{"text": "Hello there. ", "context_id": str(number), "flush": True} for number in range(4)]
    sent = [{"type": "websocket.receive", "text": json.dumps(text)} for text in texts]
    messages = iter([{"type": "websocket.connect"}, *sent])

    async def receive() -> Message:
        for message in messages:
            return message
        return await asyncio.Future[Message]()

    async def send(message: Message) -> None:
        if message["type"] == "websocket.send":
            raise OSError("the client has gone")

    async def run() -> None:
        state = state_with(Chorus(len(texts)), Limits(), tmp_path)
        scope = {"type": "websocket", "app": create_app(state), "headers": [], "state": {"request_id": "id"}}
        socket, options = WebSocket(scope, receive, send), stream_options({"output_format": "pcm_16000"})
        await socket.accept()
        async with asyncio.timeout(240):
            await ElevenLabsSocket(socket, state, ANONYMOUS, None, options, multi=True).run()
        assert state.queue.in_flight == 0

    with caplog.at_level(logging.INFO, "shoal"):
        asyncio.run(run())
    assert caplog.messages[-1] == "id: client disconnected"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
