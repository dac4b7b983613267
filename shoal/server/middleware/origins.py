"""Decide which web pages may call the server from a browser.

Pages of other origins may not, unless `cors_origins` names them: CORS hides responses from them, and requests that
browsers send without a preflight (forms, WebSockets) are rejected here. Programs send no Origin header and are not
affected.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.api.exceptions import ForeignOrigin
from shoal.server.error_responses import send_error

METHODS = ("GET", "POST", "DELETE")
# Any, because SDKs send headers of their own (X-Stainless-Lang, X-Fern-Language), more with every version.
REQUEST_HEADERS = ("*",)
EXPOSED_HEADERS = (
    *("X-Request-ID", "X-Sample-Rate", "X-Channels", "X-Model", "X-Seed", "X-Ignored-Fields", "X-Spoken-Text"),
    *("request-id", "Retry-After", "Content-Disposition"),
)
FOREIGN_SITES = ("cross-site", "same-site")  # values of Sec-Fetch-Site
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
REJECTION = "a page of {origin} may not use this server; add the origin to cors_origins to allow it"


class OriginMiddleware:
    """Rejects unsafe requests of pages of other origins with a 403; answers allowed origins with CORS headers."""

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        self._allowed, self._app = allowed, app
        self._cors = CORSMiddleware(
            app,
            allow_origins=allowed,
            allow_methods=METHODS,
            allow_headers=REQUEST_HEADERS,
            expose_headers=EXPOSED_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and self._is_foreign(scope):
            origin = Headers(scope=scope).get("origin", "another origin")[:128]
            await send_error(scope, receive, send, ForeignOrigin(REJECTION.format(origin=origin)))
        else:
            await (self._cors if self._allowed else self._app)(scope, receive, send)

    def _is_foreign(self, scope: Scope) -> bool:
        if not any(name in (b"origin", b"sec-fetch-site") for name, _ in scope["headers"]):
            return False  # not a browser
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if scope.get("method") in SAFE_METHODS or "*" in self._allowed or origin in self._allowed:
            return False
        # Not all browsers send Sec-Fetch-Site, and none does for WebSockets; then Origin must match Host.
        site = headers.get("sec-fetch-site")
        if site is None:
            return origin is not None and _host(origin) != headers.get("host")
        return site in FOREIGN_SITES


def _host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""  # malformed, such as http://[, and so equal to no Host header
