"""Turn unhandled exceptions into 500 responses in the format of the API that was called."""

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.server.error_responses import error_response

logger = logging.getLogger(__name__)


class ErrorMiddleware:
    """Logs an unhandled exception, and answers with a 500 if no response has been started."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

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
