"""Bound the number of open requests and WebSockets.

Health probes and metrics are exempt: an orchestrator must not restart a server because it is full.
"""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.api.exceptions import ServerFull
from shoal.server.error_responses import send_error

PROBES = ("/health", "/ready", "/ping", "/metrics")


class ConnectionLimit:
    """Rejects requests above `max_connections` with a 503 whose Retry-After is `retry_after_seconds()`."""

    def __init__(self, app: ASGIApp, max_connections: int, retry_after_seconds: Callable[[], float]) -> None:
        self._app, self._max_connections, self._retry_after_seconds = app, max_connections, retry_after_seconds
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in PROBES:
            await self._app(scope, receive, send)
        elif self._open >= self._max_connections:
            full = ServerFull(
                f"the limit of {self._max_connections} open requests and sockets is reached; try again later"
            )
            await send_error(scope, receive, send, full, self._retry_after_seconds())
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
