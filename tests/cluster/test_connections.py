"""Connections of clients with many requests at once."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from shoal.cluster.balancer.connections import SeparateConnections

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class CountingServer:
    """Counts connections. Sends the head of an answer at once and its body when `go_on` is set."""

    def __init__(self) -> None:
        self.connections, self.waiting, self.go_on = 0, 0, asyncio.Event()
        self.ended = 0
        self._changed = asyncio.Condition()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is checked whenever a request has arrived or a connection has ended."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, OSError):
            while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /answer"):
                writer.write(ANSWER)
                self.waiting += 1
                await self._notify()
                await self.go_on.wait()
                writer.write(b"ok")
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        self.ended += 1
        await self._notify()


@asynccontextmanager
async def connected(
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[tuple[CountingServer, httpx.AsyncClient]]:
    counting = CountingServer()
    server = await asyncio.start_server(counting.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", transport=SeparateConnections(clock), trust_env=False, timeout=240
    ) as http:
        yield counting, http
    server.close()
    await counting.wait_for(lambda: counting.ended == counting.connections)


def test_a_connection_serves_one_request_after_the_other() -> None:
    async def run() -> None:
        async with connected() as (server, http):
            server.go_on.set()
            assert [(await http.get("/answer")).content for _ in range(3)] == [b"ok"] * 3
            assert server.connections == 1

    asyncio.run(run())


def test_requests_at_once_have_a_connection_each_and_leave_them_to_the_next() -> None:
    async def run() -> None:
        async with connected() as (server, http):
            for _ in range(2):
                server.waiting = 0
                server.go_on.clear()
                requests = [asyncio.create_task(http.get("/answer")) for _ in range(5)]
                await server.wait_for(lambda: server.waiting == 5)
                server.go_on.set()
                assert [answer.content for answer in await asyncio.gather(*requests)] == [b"ok"] * 5
                assert server.connections == 5

    asyncio.run(run())


def test_connections_without_requests_are_closed_by_a_later_one() -> None:
    now = 0.0

    async def run() -> None:
        nonlocal now
        async with connected(lambda: now) as (server, http):
            requests = [asyncio.create_task(http.get("/answer")) for _ in range(5)]
            await server.wait_for(lambda: server.waiting == 5)
            server.go_on.set()
            await asyncio.gather(*requests)
            now = 60.0
            assert (await http.get("/answer")).content == b"ok"
            await server.wait_for(lambda: server.ended == 4)  # the last one was used again
            assert (await http.get("/answer")).content == b"ok"
            assert (server.connections, server.ended) == (5, 4)

    asyncio.run(run())


def test_a_request_that_fails_or_is_given_up_leaves_a_usable_client() -> None:
    async def run() -> None:
        async with connected() as (server, http):
            with pytest.raises(httpx.RemoteProtocolError):
                await http.get("/closes")
            async with http.stream("GET", "/answer"):
                pass  # closed before its body has arrived
            server.go_on.set()
            assert (await http.get("/answer")).content == b"ok"
            assert server.connections == 3

    asyncio.run(run())
