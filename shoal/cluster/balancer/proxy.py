"""Forward HTTP requests to a worker; retry on another one if it fails before it has sent audio."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
import ormsgpack
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from shoal.api.accounting import cancel_on_disconnect
from shoal.api.admission import BodyBudget
from shoal.api.bodies.parsing import JSON, MSGPACK
from shoal.api.exceptions import NotReady, SlowReader
from shoal.cluster.balancer.comparison import Answer, Comparison, CopiedRequest
from shoal.cluster.balancer.config import BalancerConfig
from shoal.cluster.balancer.workers import RequestTimer, Worker, WorkerPool
from shoal.errors import EngineStopped
from shoal.server.request_body import INLINE_BYTES, media_type, read_body
from shoal.server.streaming_response import close_connection, wait_for_disconnect, write_timeout

logger = logging.getLogger(__name__)

# Routes that only generate audio, and others that store nothing: a request can safely be retried.
SPEECH_PATHS = ("/v1/tts", "/v1/audio/speech", "/v1/text-to-speech/", "/v1/text-to-dialogue", "/invocations")
STATELESS_PATHS = (*SPEECH_PATHS, "/v1/vqgan/", "/v1/text", "/v1/convert")
ELEVENLABS_PREFIX = "/compat/elevenlabs"  # the same routes again
RETRIED_STATUSES = (429, 502, 503)  # the worker is full or shutting down; another one may accept the request
# Hop-by-hop headers (RFC 9110), and those that the balancer sets or checks itself: Host, X-Request-ID, Origin.
CONNECTION_HEADERS = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"),
    *("upgrade", "http2-settings", "host", "origin", "content-length", "expect", "x-request-id"),
}


class Proxy:
    """Sends each request to the best worker."""

    def __init__(
        self,
        config: BalancerConfig,
        pool: WorkerPool,
        client: httpx.AsyncClient,
        comparison: Comparison | None = None,
    ) -> None:
        self._config, self._pool, self._client, self._comparison = config, pool, client, comparison
        self._budget = BodyBudget(config.limits.all_bodies_bytes)

    async def forward(self, request: Request) -> Response:
        """Return the worker's response, streamed.

        Raises NotReady without workers, EngineStopped if all failed, and ClientDisconnected if the client disconnects
        before the first byte: the worker then stops generating.
        """
        body = await read_body(request, self._config.limits, self._budget)
        return await cancel_on_disconnect(
            partial(wait_for_disconnect, request.receive), partial(self._try_workers, request, body)
        )

    async def _try_workers(self, request: Request, body: bytes) -> Response:
        workers = self._pool.order(voice_of(request, body))[: self._config.attempts]
        if not workers:
            raise NotReady("no worker is ready; /v1/workers says why")
        for number, worker in enumerate(workers, 1):
            response = await self._try(request, body, worker, is_last=number == len(workers))
            if response is not None:
                return response
        raise EngineStopped("all workers failed before they sent audio; send the request again")

    async def _try(self, request: Request, body: bytes, worker: Worker, *, is_last: bool) -> Response | None:
        """Return the response of one worker, or None if another worker should be tried."""
        async with AsyncExitStack() as stack:
            answer = Answer()
            timer = stack.enter_context(worker.request())
            sending = self._client.build_request(
                request.method, _target(request, worker), headers=_forwarded(request), content=body
            )
            try:
                async with worker.waiting():
                    response = await self._client.send(sending, stream=True)
                    stack.push_async_callback(response.aclose)
                    if response.status_code >= 600:  # uvicorn cannot send these
                        raise httpx.RemoteProtocolError(f"status {response.status_code}")
                    chunks = aiter(response.aiter_raw())
                    first = await anext(chunks, b"")
            except httpx.TransportError as problem:
                self._lost(request, worker, problem)
                return None
            if response.status_code in RETRIED_STATUSES and not is_last and is_repeatable(request):
                worker.counts["retried"] += 1
                return None
            timer.first_byte()
            worker.counts["failed"] += response.status_code >= 500
            body_chunks = relay(first, chunks, timer, worker, request.scope)
            comparison = self._comparison
            if comparison is not None and is_speech(request) and comparison.selects():
                body_chunks = comparison.observe(
                    body_chunks, answer, response.status_code, copied_request(request, body)
                )
            headers = _returned(response.headers, worker)
            stall_seconds = self._config.limits.stall_seconds
            return RelayedResponse(body_chunks, response.status_code, headers, stall_seconds, held=stack.pop_all())

    def _lost(self, request: Request, worker: Worker, problem: httpx.TransportError) -> None:
        """Mark the worker unhealthy until its next health check. Raises EngineStopped if a retry is not safe."""
        worker.mark(f"connection failed: {type(problem).__name__}")
        worker.counts["failed"] += 1
        if not is_repeatable(request) and not isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout):
            raise EngineStopped("the worker failed during the request, which may or may not have had an effect")
        logger.warning("worker %s lost: trying the request on another worker", worker.name)


class RelayedResponse(StreamingResponse):
    """Streamed response that holds the worker's connection until it is sent or the client disconnects.

    A client that reads nothing for `stall_seconds` is disconnected.
    """

    def __init__(
        self,
        content: AsyncIterator[bytes],
        status: int,
        headers: dict[str, str],
        stall_seconds: float,
        *,
        held: AsyncExitStack,
    ) -> None:
        super().__init__(content, status, headers)
        self._stall_seconds, self._held = stall_seconds, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with write_timeout(self._stall_seconds):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except SlowReader as problem:
            logger.warning("response aborted: %s", problem)
            await close_connection(scope, immediately=True)
        finally:
            await self._held.aclose()


async def relay(
    first: bytes, chunks: AsyncIterator[bytes], timer: RequestTimer, worker: Worker, scope: Scope
) -> AsyncIterator[bytes]:
    """Yield the body of a response. If the worker is lost, the client's connection is closed before the last chunk."""
    try:
        chunk = first
        while chunk:
            yield chunk
            async with worker.waiting():
                chunk = await anext(chunks, b"")
        timer.end()
    except httpx.TransportError as problem:
        worker.counts["failed"] += 1
        worker.mark(f"connection failed while it sent audio: {type(problem).__name__}")
        await close_connection(scope, immediately=False)


def is_repeatable(request: Request) -> bool:
    return request.method in ("GET", "HEAD", "OPTIONS") or _path(request).startswith(STATELESS_PATHS)


def is_speech(request: Request) -> bool:
    return request.method == "POST" and _path(request).startswith(SPEECH_PATHS)


def _path(request: HTTPConnection) -> str:
    return request.url.path.removeprefix(ELEVENLABS_PREFIX)


def copied_request(request: Request, body: bytes) -> CopiedRequest:
    text = _field(_parsed(media_type(request), body), "text", "input") if len(body) <= INLINE_BYTES else None
    return CopiedRequest(request.method, path_and_query(request), _forwarded(request), body, text)


def voice_of(request: Request, body: bytes) -> str | None:
    """Return the routing key of a request's voice; None if finding it is not cheap: affinity is only a preference."""
    if (in_path := voice_in_path(request)) or len(body) > INLINE_BYTES:
        return in_path
    voice = _field(_parsed(media_type(request), body), "reference_id", "voice")
    return f"name:{voice}" if voice else None


def voice_in_path(request: HTTPConnection) -> str | None:
    """Return the routing key of the voice in one of ElevenLabs' paths."""
    path = _path(request)
    return f"name:{path.split('/')[3]}" if path.startswith("/v1/text-to-speech/") else None


def _parsed(kind: str, body: bytes) -> Any:
    try:
        if kind == JSON:
            return json.loads(body)
        return ormsgpack.unpackb(body) if kind == MSGPACK else None
    except (ValueError, RecursionError):
        return None  # the worker answers with the error


def _field(document: Any, *names: str) -> str | None:
    found = (document.get(name) for name in names) if isinstance(document, dict) else ()
    return next((value for value in found if isinstance(value, str) and value), None)


def _target(request: Request, worker: Worker) -> str:
    return f"{worker.address.url}{path_and_query(request)}"


def path_and_query(request: HTTPConnection) -> str:
    """Return the target as the client wrote it: a decoded path would lose the escapes of spaces and question marks."""
    query = request.scope["query_string"].decode("latin-1")
    path = request.scope.get("raw_path") or quote(request.scope["path"]).encode()
    return f"{path.decode('latin-1')}{f'?{query}' if query else ''}"


def _forwarded(request: Request) -> list[tuple[bytes, bytes]]:
    headers = [each for each in request.headers.raw if each[0].decode("latin-1") not in CONNECTION_HEADERS]
    return [*headers, (b"x-request-id", request.state.request_id.encode())]


def _returned(headers: httpx.Headers, worker: Worker) -> dict[str, str]:
    own = (CONNECTION_HEADERS | {"date"}) - {"content-length"}  # the balancer adds a date to every response
    kept = {name: value for name, value in headers.items() if name not in own}
    return {**kept, "x-shoal-worker": worker.name}
