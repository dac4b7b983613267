"""Forward WebSockets to a worker: messages in both directions until either side closes."""

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from shoal.cluster.balancer.config import BalancerConfig
from shoal.cluster.balancer.proxy import path_and_query
from shoal.cluster.balancer.workers import Worker, WorkerPool

TRY_AGAIN_LATER = 1013
FORWARDED = ("authorization", "xi-api-key", "model", "x-request-id", "user-agent")


async def forward_socket(socket: WebSocket, config: BalancerConfig, pool: WorkerPool) -> None:
    """Connect to the best worker before accepting, so that the client sees a refusal as one."""
    for worker in pool.order(None)[: config.attempts]:
        with worker.request():
            try:
                upstream = await _connect(socket, worker, config)
            except InvalidStatus as refused:
                await socket.close(reason=f"the worker refused the socket: {refused.response.status_code}")
                return
            except (OSError, TimeoutError, WebSocketException) as problem:
                worker.mark(f"connection failed: {type(problem).__name__}")
                continue
            async with upstream:
                await _relay(socket, upstream)
            return
    await socket.close(TRY_AGAIN_LATER, "no worker is ready; /v1/workers says why")


async def _connect(socket: WebSocket, worker: Worker, config: BalancerConfig) -> ClientConnection:
    parts = urlsplit(worker.address.url)
    return await connect(
        f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}{path_and_query(socket)}",
        additional_headers={name: value for name, value in socket.headers.items() if name in FORWARDED},
        subprotocols=socket.scope.get("subprotocols") or None,
        compression=None,
        max_size=config.limits.body_bytes,
        open_timeout=config.connect_seconds,
        proxy=None,
    )


async def _relay(socket: WebSocket, upstream: ClientConnection) -> None:
    await socket.accept(upstream.subprotocol)
    async with asyncio.TaskGroup() as tasks:
        to_client = tasks.create_task(_to_client(socket, upstream))
        to_worker = tasks.create_task(_to_worker(socket, upstream))
        to_client.add_done_callback(lambda _: to_worker.cancel())
        to_worker.add_done_callback(lambda _: to_client.cancel())


async def _to_worker(socket: WebSocket, upstream: ClientConnection) -> None:
    with suppress(ConnectionClosed, WebSocketDisconnect):
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                await upstream.close(message.get("code") or 1000)
                return
            content = message.get("bytes")
            await upstream.send(message["text"] if content is None else content)


async def _to_client(socket: WebSocket, upstream: ClientConnection) -> None:
    """Send what the worker sends, then its close code."""
    with suppress(WebSocketDisconnect, RuntimeError):  # RuntimeError: starlette, after the client has closed
        with suppress(ConnectionClosed):
            async for message in upstream:
                await (socket.send_text(message) if isinstance(message, str) else socket.send_bytes(message))
        code = upstream.close_code if upstream.close_code not in (None, 1005, 1006) else 1011
        await socket.close(code if code is not None else 1011, upstream.close_reason or "")
