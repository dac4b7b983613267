"""Transport for httpx clients that have many connections open."""

import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack

import httpx

# Seconds without a request after which a connection is closed; checked whenever a request ends.
IDLE_SECONDS = 5.0

Pool = deque[tuple[httpx.AsyncHTTPTransport, float]]  # with the time of its last request, oldest first


class SeparateConnections(httpx.AsyncBaseTransport):
    """Keeps every connection in a pool of its own and reuses the one that was used last.

    httpx scans all connections of a pool whenever a request begins or ends. With 64 of them this took three quarters of
    a client's CPU time and delayed its requests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._idle: defaultdict[tuple[str, str, int | None], Pool] = defaultdict(deque)
        self._context = httpx.create_ssl_context(trust_env=False)  # loading certificates takes 20 ms

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        idle = self._idle[request.url.scheme, request.url.host, request.url.port]
        transport = idle.pop()[0] if idle else httpx.AsyncHTTPTransport(verify=self._context, trust_env=False)
        with ExitStack() as cleanup:
            cleanup.callback(lambda: idle.append((transport, self._clock())))
            response = await transport.handle_async_request(request)
            cleanup.pop_all()
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _BorrowedStream(response.stream, lambda: self._give_back(transport, idle))
        return response

    async def aclose(self) -> None:
        for idle in self._idle.values():
            while idle:
                await idle.pop()[0].aclose()

    async def _give_back(self, transport: httpx.AsyncHTTPTransport, idle: Pool) -> None:
        now = self._clock()
        idle.append((transport, now))
        while idle and idle[0][1] < now - IDLE_SECONDS:
            await idle.popleft()[0].aclose()


class _BorrowedStream(httpx.AsyncByteStream):
    """Body of a response; gives the connection back when it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, give_back: Callable[[], Awaitable[None]]) -> None:
        self._stream, self._give_back = stream, give_back
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                await self._stream.aclose()
            finally:
                await self._give_back()
