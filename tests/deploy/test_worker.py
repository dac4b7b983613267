"""The state without HTTP: what every host that brings its own protocol gets."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.api.exceptions import SchemaViolation
from shoal.api.state import ServerState
from shoal.deploy.runpod_worker import handler_for
from shoal.deploy.worker import EventLoopThread, close_worker, open_worker, speech_stream
from shoal.errors import EngineBusy, InvalidRequest
from shoal.server.error_responses import status_of
from shoal.settings import read_settings
from tests.deploy.conftest import SAY

LONG = {**SAY, "max_new_tokens": 400, "streaming": True}


@pytest.fixture(scope="module")
def state(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerState]:
    home = tmp_path_factory.mktemp("state")
    given = {"model": str(tiny_directory), "guard": False, "slots": 2, "max_waiting": 1, "voices": home}
    state = open_worker(read_settings(given, variables={"SHOAL_API_KEYS": "of-no-use-here"}).settings)
    yield state
    close_worker(state)


def test_a_disconnect_frees_the_slot(state: ServerState) -> None:
    async def cancel_early() -> None:
        pieces = handler_for(state)({"id": "1", "input": LONG})
        assert (await anext(pieces))["audio"]
        assert state.queue.in_flight == 1
        await pieces.aclose()

    asyncio.run(cancel_early())
    assert state.queue.in_flight == 0


def test_the_queue_is_bounded(state: ServerState) -> None:
    async def crowd() -> list[bytes | BaseException]:
        async def one(number: int) -> bytes:
            async with speech_stream(state, {**SAY, "seed": number}, str(number)) as (_, stream):
                return await stream.read_all()

        return await asyncio.gather(*(one(number) for number in range(6)), return_exceptions=True)

    answers = asyncio.run(crowd())
    refused = [answer for answer in answers if not isinstance(answer, bytes)]
    assert [type(answer) for answer in refused] == [EngineBusy] * 3, refused


@pytest.mark.parametrize("content", [None, "text", [], {"text": "a", "input": "b"}])
def test_invalid_bodies_are_refused(state: ServerState, content: object) -> None:
    async def ask() -> None:
        async with speech_stream(state, content, "1"):
            pass

    with pytest.raises(InvalidRequest):
        asyncio.run(ask())


def test_events_are_refused_where_there_are_none(state: ServerState) -> None:
    content = {"model": "tts-1", "voice": "alloy", "input": "Hello.", "seed": 3, "max_new_tokens": 6}

    async def ask(**fields: str) -> bytes:
        async with speech_stream(state, {**content, **fields}, "1") as (_, stream):
            return await stream.read_all()

    with pytest.raises(SchemaViolation) as refused:
        asyncio.run(ask(stream_format="sse"))
    assert (refused.value.field, status_of(refused.value)) == ("stream_format", 422)
    assert asyncio.run(ask(stream_format="audio", response_format="wav")).startswith(b"RIFF")


def test_a_loop_that_is_closed_ends_what_it_runs(state: ServerState) -> None:
    thread, ended = EventLoopThread(), []

    async def listen() -> None:
        try:
            async with speech_stream(state, LONG, "1") as (_, stream):
                await stream.read_all()
        finally:
            ended.append(True)

    listening = thread.submit(listen())
    thread.wait(asyncio.sleep(0.05))
    thread.close()
    assert listening.cancelled()
    assert ended == [True]
