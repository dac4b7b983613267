"""Turn unhandled exceptions into 500 responses in the format of the API that was called."""

import asyncio
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.api.exceptions import NotReady
from shoal.server.error_responses import STARTING_SECONDS, error_response

logger = logging.getLogger(__name__)


class ErrorMiddleware:
    """Logs an unhandled exception, and answers with a 500 if no response has been started.

    A request that shutdown cancels gets a 503. `is_ending` returns whether shutdown is what cancels requests.
    """

    def __init__(self, app: ASGIApp, is_ending: Callable[[], bool] = lambda: True) -> None:
        self._app, self._is_ending = app, is_ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tracked_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, tracked_send)
        except Exception as error:  # edge: HTTP 500
            if started or scope["type"] != "http":
                raise
            logger.exception("unhandled exception in a request", exc_info=error)
            await error_response(scope["path"], error)(scope, receive, send)
        except asyncio.CancelledError:
            if not started and scope["type"] == "http" and self._is_ending():
                ended = NotReady("the server was shut down before it could answer; send the request again")
                await error_response(scope["path"], ended, STARTING_SECONDS)(scope, receive, send)
            raise
