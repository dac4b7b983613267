"""Which web pages may use the server from a visitor's browser.

Pages of other origins may not, unless they are named: a browser hides our answers from them, and what it would send
without asking first (a form, a WebSocket) is refused here. Programs are not concerned, since they send no such headers.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.api.exceptions import ForeignOrigin
from shoal.server.error_responses import refuse

METHODS = ("GET", "POST", "DELETE")
SENT = ("Authorization", "Content-Type", "Accept", "X-Request-ID", "model")
SHOWN = ("X-Request-ID", "X-Sample-Rate", "X-Channels", "X-Seed", "Retry-After", "Content-Disposition")
FOREIGN = ("cross-site", "same-site")
HARMLESS = ("GET", "HEAD", "OPTIONS")
REFUSAL = "a page of {origin} may not use this server; name it in cors_origins if it should"


class Origins:
    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        self._allowed, self._bare = allowed, app
        self._answering = CORSMiddleware(
            app, allow_origins=allowed, allow_methods=METHODS, allow_headers=SENT, expose_headers=SHOWN
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and self._foreign(scope):
            origin = Headers(scope=scope).get("origin", "another origin")[:128]
            await refuse(scope, receive, send, ForeignOrigin(REFUSAL.format(origin=origin)))
        else:
            await (self._answering if self._allowed else self._bare)(scope, receive, send)

    def _foreign(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if scope.get("method") in HARMLESS or "*" in self._allowed or origin in self._allowed:
            return False
        # The browser says it itself, though not for a WebSocket and not everywhere; then the origin has to be ours.
        site = headers.get("sec-fetch-site")
        if site is None:
            return origin is not None and _host(origin) != headers.get("host")
        return site in FOREIGN


def _host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""  # such as http://[, which is nobody's
