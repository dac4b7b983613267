"""Every request has an id: the client's, if it sent a decent one in `X-Request-ID`, else a new one.

The id is on the answer and on each line of the log about the request. Also here, since it sees every request end: the
line of the access log and the counters. A socket is in them only when it is refused; what it speaks, `tally` counts.
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
ANSWERS = ("http.response.start", "websocket.http.response.start")
LONGEST_PATH = 200  # characters, in the log
DECENT = re.compile(rb"[A-Za-z0-9._-]{1,128}")

current_id: ContextVar[str] = ContextVar("shoal_request_id", default="")


class Identity:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # An app within another finds the request named already.
        if scope["type"] not in ("http", "websocket") or "request_id" in scope.setdefault("state", {}):
            await self._app(scope, receive, send)
            return
        id = scope["state"]["request_id"] = _id_of(scope)
        token = current_id.set(id)
        try:
            await self._answer(scope, receive, send, id)
        finally:
            current_id.reset(token)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, id: str) -> None:
        began, status = time.monotonic(), 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] in ANSWERS:
                status = message["status"]
                message["headers"] = [*message["headers"], (HEADER, id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            if status or scope["type"] == "http":
                self._count(scope, status, time.monotonic() - began)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.responses.labels(route, str(status)).inc()
        self._metrics.response_seconds.labels(route).observe(seconds)
        method = scope.get("method", "GET")  # of the handshake of a socket
        extra = {"method": method, "route": route, "status": status, "seconds": round(seconds, 4)}
        # Figures go by routes, of which there are few; whoever reads the log wants to know what was asked for.
        where = scope["path"][:LONGEST_PATH] if route == "none" else route
        logger.info("%s %s -> %d in %.3f s", method, where, status, seconds, extra=extra)


def request_id(connection: HTTPConnection) -> str:
    return str(connection.scope["state"]["request_id"])


def _id_of(scope: Scope) -> str:
    sent = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return sent.decode() if DECENT.fullmatch(sent) else uuid.uuid4().hex
