"""The Wyoming server over an engine under the test's control; tests/clients/test_wyoming.py has it with nano."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.event import Event, Eventable
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart

from shoal.api.config import KeyLimits, Limits, ServerConfig
from shoal.api.state import ServerState
from shoal.errors import InvalidRequest
from shoal.server.run import bind, check_access
from shoal.server.wyoming import WyomingConnection, WyomingServer
from tests.server.conftest import free_port
from tests.server.standin import Standin, state_with

TIMEOUT = 240.0
DEFAULTS, NO_LIMITS = Limits(), KeyLimits()
Talk = Callable[[AsyncTcpClient, ServerState, Standin], Awaitable[None]]


@asynccontextmanager
async def serving(state: ServerState) -> AsyncIterator[int]:
    port = free_port()
    server = WyomingServer(state)
    with bind(replace(state.config, port=port)) as listener:
        await server.start(listener)
        try:
            yield port
        finally:
            await server.close()


def talk(tmp_path: Path, conversation: Talk, limits: Limits = DEFAULTS, key_limits: KeyLimits = NO_LIMITS) -> None:
    async def run() -> None:
        standin = Standin()
        state = state_with(standin, limits, tmp_path)
        state.config = replace(state.config, key_limits=key_limits)
        async with asyncio.timeout(TIMEOUT), serving(state) as port, AsyncTcpClient("127.0.0.1", port) as client:
            await conversation(client, state, standin)

    asyncio.run(run())


async def send(client: AsyncTcpClient, *messages: Eventable) -> None:
    for message in messages:
        await client.write_event(message.event())


async def read(client: AsyncTcpClient, last: str) -> Event:
    while True:
        event = await client.read_event()
        assert event is not None
        if event.type == last:
            return event


async def idle(state: ServerState) -> None:
    while state.queue.in_flight:
        await asyncio.sleep(0.01)


def test_a_disconnect_cancels_the_request(tmp_path: Path) -> None:
    async def conversation(client: AsyncTcpClient, state: ServerState, standin: Standin) -> None:
        await send(client, Synthesize("Hello."))
        await read(client, "audio-chunk")
        assert state.queue.in_flight == 1
        await client.disconnect()
        await idle(state)
        assert standin.spoken == []

    talk(tmp_path, conversation)


def test_an_error_for_a_client_that_has_gone_is_dropped(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop", reason="other event loops raise OSError by themselves")

    async def run() -> None:
        state = state_with(Standin(), DEFAULTS, tmp_path)
        async with serving(state) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            connection = WyomingConnection(state, reader, writer)
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()
            with pytest.raises(ConnectionResetError):
                await connection.write(Error("the queue is full"))

    uvloop.run(run())


def test_streamed_text_is_spoken_before_its_end(tmp_path: Path) -> None:
    async def conversation(client: AsyncTcpClient, state: ServerState, standin: Standin) -> None:
        await send(client, SynthesizeStart(), SynthesizeChunk("The first sentence of all. And"))
        await read(client, "audio-chunk")
        assert standin.begun == ["The first sentence of all."]

    talk(tmp_path, conversation)


def test_the_default_limits_of_keys_hold(tmp_path: Path) -> None:
    async def conversation(client: AsyncTcpClient, state: ServerState, standin: Standin) -> None:
        standin.go_on.set()
        await send(client, Synthesize("Hello."))
        await read(client, "audio-stop")
        await send(client, Synthesize("Again."))
        assert Error.from_event(await read(client, "error")).code == "rate_limited"

    talk(tmp_path, conversation, key_limits=KeyLimits(requests_per_minute=1))


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([SynthesizeStart(), SynthesizeStart()], "invalid_request"),
        ([Synthesize("x" * 101)], "text_error"),
    ],
)
def test_what_cannot_be_served_is_an_error(tmp_path: Path, messages: list[Eventable], code: str) -> None:
    async def conversation(client: AsyncTcpClient, state: ServerState, standin: Standin) -> None:
        await send(client, *messages)
        assert Error.from_event(await read(client, "error")).code == code
        await idle(state)

    talk(tmp_path, conversation, Limits(text_characters=100))


def test_connections_above_the_limit_and_idle_ones_are_closed(tmp_path: Path) -> None:
    async def above(client: AsyncTcpClient, state: ServerState, standin: Standin) -> None:
        assert Error.from_event(await read(client, "error")).code == "server_full"

    talk(tmp_path, above, Limits(connections=0))

    async def silent(client: AsyncTcpClient, state: ServerState, standin: Standin) -> None:
        assert "no message arrived" in Error.from_event(await read(client, "error")).text

    talk(tmp_path, silent, Limits(live_idle_seconds=0.05))


def test_other_machines_may_use_it_only_if_that_is_allowed() -> None:
    open_port = ServerConfig(wyoming_port=10_200, wyoming_host="0.0.0.0")
    with pytest.raises(InvalidRequest, match="the Wyoming protocol has no keys"):
        check_access(open_port)
    check_access(replace(open_port, insecure=True))
    check_access(replace(open_port, wyoming_host="127.0.0.1"))
