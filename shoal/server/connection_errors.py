"""Error handling of connections that cannot report an error by status code: WebSockets and Wyoming."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from shoal.errors import ShoalError

logger = logging.getLogger(__name__)


@asynccontextmanager
async def connection_errors(
    request_id: str,
    disconnects: type[Exception] | tuple[type[Exception], ...],
    fail: Callable[[BaseException], Awaitable[None]],
    fail_internally: Callable[[], Awaitable[None]],
) -> AsyncIterator[None]:
    """Handle the errors of the block, in which one task group serves a connection.

    `disconnects` are logged. `fail` reports the first ShoalError to the client; any other error is logged with its
    traceback and followed by `fail_internally`.
    """
    try:
        yield
    except* disconnects:
        logger.info("%s: client disconnected", request_id)
    except* ShoalError as group:
        await fail(group.exceptions[0])
    except* Exception:  # edge: the counterpart of HTTP 500
        logger.exception("%s: internal error", request_id)
        await fail_internally()


def require_connected(socket: WebSocket) -> None:
    """Raise WebSocketDisconnect if the client has disconnected.

    After the first failed send Starlette raises RuntimeError, in the tasks that the task group has not cancelled yet.
    """
    if socket.application_state is WebSocketState.DISCONNECTED:
        raise WebSocketDisconnect(1006)
