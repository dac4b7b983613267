"""Every request has an id: the client's, if it sent a decent one in `X-Request-ID`, else a new one.

The id is on the answer and on each line of the log about the request. Also here, since it sees every request end: the
line of the access log, the counters, and the last answer to a bug.
"""

import logging
import re
import time
import uuid
from contextvars import ContextVar

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.metrics import Metrics
from shoal.server.problems import bug_response

logger = logging.getLogger(__name__)

HEADER = b"x-request-id"
LONGEST_PATH = 200  # characters, in the log
DECENT = re.compile(rb"[A-Za-z0-9._-]{1,128}")

current_id: ContextVar[str] = ContextVar("shoal_request_id", default="")


class Identity:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        id = _id_of(scope)
        scope.setdefault("state", {})["request_id"] = id
        token = current_id.set(id)
        try:
            if scope["type"] == "http":
                await self._answer(scope, receive, send, id)
            else:
                await self._app(scope, receive, send)
        finally:
            current_id.reset(token)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, id: str) -> None:
        began, status = time.monotonic(), 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (HEADER, id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:
            if status:
                raise
            await bug_response(scope["path"], error)(scope, receive, named)
        finally:
            self._count(scope, status, time.monotonic() - began)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.responses.labels(route, str(status)).inc()
        self._metrics.response_seconds.labels(route).observe(seconds)
        extra = {"method": scope["method"], "route": route, "status": status, "seconds": round(seconds, 4)}
        # Figures go by routes, of which there are few; whoever reads the log wants to know what was asked for.
        where = scope["path"][:LONGEST_PATH] if route == "none" else route
        logger.info("%s %s -> %d in %.3f s", scope["method"], where, status, seconds, extra=extra)


def request_id(connection: HTTPConnection) -> str:
    return str(connection.scope["state"]["request_id"])


def _id_of(scope: Scope) -> str:
    sent = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return sent.decode() if DECENT.fullmatch(sent) else uuid.uuid4().hex
