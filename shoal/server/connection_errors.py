"""Error handling of connections that cannot report an error by status code: WebSockets and Wyoming."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

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

    `disconnects` are logged. `fail` is called with the first ShoalError, to tell the client; any other error is logged
    with its traceback and followed by `fail_internally`.
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
