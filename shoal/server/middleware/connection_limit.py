"""How many requests and sockets are inside at one time. Past the bound they are refused, but for the probes.

A server that is full is not a dead one: who asks whether it lives, whether it is ready and how it fares is answered.
"""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.api.exceptions import ServerFull
from shoal.server.error_responses import refuse

PROBES = ("/health", "/ready", "/ping", "/metrics")


class Occupancy:
    """`wait_seconds` says how long who is refused should stay away."""

    def __init__(self, app: ASGIApp, most: int, wait_seconds: Callable[[], float]) -> None:
        self._app, self._most, self._wait_seconds = app, most, wait_seconds
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in PROBES:
            await self._app(scope, receive, send)
        elif self._inside >= self._most:
            full = ServerFull(f"{self._inside} requests and sockets are open, and no more are taken; try again later")
            await refuse(scope, receive, send, full, self._wait_seconds())
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1
