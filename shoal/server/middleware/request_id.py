"""Give every request an id: the client's, if `X-Request-ID` has a valid one, else a new one.

The id is in the response headers and in each log line about the request. The middleware also writes the access log and
the HTTP metrics. It counts a WebSocket only when the handshake is rejected; `RequestAccounting` counts the speech of a
session.
"""

import logging
import re
import time
import uuid
from contextvars import ContextVar

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.metrics import Metrics

logger = logging.getLogger(__name__)

HEADER = b"x-request-id"
RESPONSE_STARTS = ("http.response.start", "websocket.http.response.start")
MAX_LOGGED_PATH = 200  # characters
VALID_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")

current_id: ContextVar[str] = ContextVar("shoal_request_id", default="")


class RequestIDMiddleware:
    """Sets the id of every request in scope, log context and response; records HTTP metrics and the access log."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Nested application (multi-model): the outer one has set the id and counts the request.
        if scope["type"] not in ("http", "websocket") or "request_id" in scope.setdefault("state", {}):
            await self._app(scope, receive, send)
            return
        id = scope["state"]["request_id"] = _id_of(scope)
        token = current_id.set(id)
        try:
            await self._serve(scope, receive, send, id)
        finally:
            current_id.reset(token)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, id: str) -> None:
        started, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] in RESPONSE_STARTS:
                status = message["status"]
                message["headers"] = [*message["headers"], (HEADER, id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if status or scope["type"] == "http":
                self._record(scope, status, time.monotonic() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.responses.labels(route, str(status)).inc()
        self._metrics.response_seconds.labels(route).observe(seconds)
        method = scope.get("method", "GET")  # a WebSocket handshake has no method
        extra = {"method": method, "route": route, "status": status, "seconds": round(seconds, 4)}
        # Metrics are labelled by route to bound the number of series; the log also names paths that match no route.
        path = scope["path"][:MAX_LOGGED_PATH] if route == "none" else route
        logger.info("%s %s -> %d in %.3f s", method, path, status, seconds, extra=extra)


def request_id(connection: HTTPConnection) -> str:
    return str(connection.scope["state"]["request_id"])


def _id_of(scope: Scope) -> str:
    sent = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return sent.decode() if VALID_ID.fullmatch(sent) else uuid.uuid4().hex
