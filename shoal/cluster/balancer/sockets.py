"""Forward WebSockets to a worker: messages in both directions until either side closes."""

import asyncio
import logging
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.http11 import Response as Refusal

from shoal.api.exceptions import NotReady, SlowReader
from shoal.cluster.balancer.config import RETRY_SECONDS, BalancerConfig
from shoal.cluster.balancer.proxy import RETRIED_STATUSES, path_and_query, voice_in_path
from shoal.cluster.balancer.workers import Worker, WorkerPool
from shoal.server.error_responses import error_response
from shoal.server.middleware.request_id import request_id
from shoal.server.streaming_response import close_connection, write_timeout

logger = logging.getLogger(__name__)

FORWARDED = ("authorization", "xi-api-key", "model", "user-agent", "traceparent", "tracestate", "baggage")
NOT_SENT = (None, 1005, 1006)  # close codes that stand for a close frame without a code, or for none
RETURNED = ("content-type", "retry-after", "www-authenticate", "x-model")


async def forward_socket(socket: WebSocket, config: BalancerConfig, pool: WorkerPool) -> None:
    """Connect to the best worker before accepting, so that the client gets a refusal as an HTTP response."""
    workers = pool.order(voice_in_path(socket))[: config.attempts]
    for number, worker in enumerate(workers, 1):
        with worker.request():
            try:
                upstream = await _connect(socket, worker, config)
            except InvalidStatus as refused:
                if refused.response.status_code in RETRIED_STATUSES and number < len(workers):
                    worker.counts["retried"] += 1
                    continue
                await socket.send_denial_response(_denial(refused.response, worker))
                return
            except (OSError, TimeoutError, WebSocketException) as problem:
                worker.mark(f"connection failed: {type(problem).__name__}")
                worker.counts["failed"] += 1
                continue
            async with upstream:
                await _relay(socket, upstream, worker, config.limits.stall_seconds)
            return
    refusal = NotReady("no worker is ready; /v1/workers says why")
    await socket.send_denial_response(error_response(socket.url.path, refusal, RETRY_SECONDS))


def _denial(refusal: Refusal, worker: Worker) -> Response:
    """Return the worker's refusal of a socket, such as 401, for the client."""
    return Response(bytes(refusal.body), refusal.status_code, _returned(refusal, worker))


def _returned(response: Refusal, worker: Worker) -> dict[str, str]:
    kept = {name: response.headers[name] for name in RETURNED if name in response.headers}
    return {**kept, "x-shoal-worker": worker.name}


async def _connect(socket: WebSocket, worker: Worker, config: BalancerConfig) -> ClientConnection:
    parts = urlsplit(worker.address.url)
    return await connect(
        f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}{path_and_query(socket)}",
        additional_headers={
            **{name: value for name, value in socket.headers.items() if name in FORWARDED},
            "x-request-id": request_id(socket),
        },
        subprotocols=socket.scope.get("subprotocols") or None,
        compression=None,
        max_size=config.limits.body_bytes,
        open_timeout=config.connect_seconds,
        proxy=None,
    )


async def _relay(socket: WebSocket, upstream: ClientConnection, worker: Worker, stall_seconds: float) -> None:
    answer = upstream.response
    headers = {} if answer is None else _returned(answer, worker)
    await socket.accept(upstream.subprotocol, [(name.encode(), value.encode()) for name, value in headers.items()])
    async with asyncio.TaskGroup() as tasks:
        to_client = tasks.create_task(_to_client(socket, upstream, worker, stall_seconds))
        to_worker = tasks.create_task(_to_worker(socket, upstream))
        to_client.add_done_callback(lambda _: to_worker.cancel())
        to_worker.add_done_callback(lambda _: to_client.cancel())


async def _to_worker(socket: WebSocket, upstream: ClientConnection) -> None:
    with suppress(ConnectionClosed, WebSocketDisconnect):
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                code = message.get("code")
                await upstream.close(1001 if code in NOT_SENT else code)
                return
            content = message.get("bytes")
            await upstream.send(message["text"] if content is None else content)


async def _to_client(socket: WebSocket, upstream: ClientConnection, worker: Worker, stall_seconds: float) -> None:
    """Forward the worker's messages, then its close code. Disconnect a client that reads none for `stall_seconds`."""
    with suppress(WebSocketDisconnect, RuntimeError):  # RuntimeError: starlette, after the client has closed
        try:
            async for message in upstream:
                async with write_timeout(stall_seconds):
                    await (socket.send_text(message) if isinstance(message, str) else socket.send_bytes(message))
        except SlowReader as problem:
            logger.warning("socket closed: %s", problem)
            await close_connection(socket.scope, immediately=True)
            return
        except ConnectionClosed as problem:
            if problem.rcvd is None:
                worker.mark("connection failed during a WebSocket session")
                worker.counts["failed"] += 1
        code = upstream.close_code
        await socket.close(1011 if code is None or code in NOT_SENT else code, upstream.close_reason or "")
