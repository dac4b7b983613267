"""HTTP of the load generator: aiohttp, which takes a fraction of the CPU time that httpx takes per request."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Protocol

from shoal.errors import MissingExtra

if TYPE_CHECKING:
    import aiohttp

# Seconds after which an idle connection is closed: less than the five after which uvicorn closes it.
KEEP_ALIVE = 4.0
READ_BUFFER = 1 << 20  # bytes


class RequestFailed(Exception):
    """The request has no complete answer; the message is the cause: timeout, no connection or cut off."""


class StreamedAnswer(Protocol):
    """Answer of a server whose body has not been read."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers; names are compared without case."""
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the body as they arrive. Raises RequestFailed."""
        ...


class HttpClient(Protocol):
    """Sends requests; redirects are not followed."""

    def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> AbstractAsyncContextManager[StreamedAnswer]:
        """Send a request and return its answer; leaving the block early cancels it. Raises RequestFailed."""
        ...


class AiohttpAnswer:
    def __init__(self, response: "aiohttp.ClientResponse") -> None:
        self._response = response
        self.status, self.headers = response.status, response.headers

    async def pieces(self) -> AsyncIterator[bytes]:
        with _failures():
            async for piece in self._response.content.iter_any():
                yield piece


class AiohttpClient:
    """Client of `open_client`."""

    def __init__(self, session: "aiohttp.ClientSession") -> None:
        self._session = session

    @asynccontextmanager
    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[StreamedAnswer]:
        with _failures():
            response = await self._session.post(url, data=body, headers=headers, allow_redirects=False)
        async with response:
            yield AiohttpAnswer(response)


@asynccontextmanager
async def open_client(timeout: float) -> AsyncIterator[HttpClient]:
    """Open a client; `timeout` limits a connection attempt and each wait for bytes, in seconds. Raises MissingExtra."""
    try:
        import aiohttp
    except ModuleNotFoundError:
        raise MissingExtra("load tests need aiohttp: pip install 'shoal-tts[bench]'") from None
    # No connection limit: requests must queue in the server. Like other clients, use the system's resolver.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE, resolver=aiohttp.ThreadedResolver())
    limits = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=limits,
        trust_env=False,  # no proxy, which would be measured too
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=READ_BUFFER,
    ) as session:
        yield AiohttpClient(session)


@contextmanager
def _failures() -> Iterator[None]:
    """Raise RequestFailed in place of aiohttp's errors."""
    import aiohttp

    try:
        yield
    except TimeoutError:
        raise RequestFailed("timeout") from None
    except aiohttp.ClientConnectorError:
        raise RequestFailed("no connection") from None
    except (aiohttp.ClientError, ConnectionError):
        raise RequestFailed("cut off") from None
