"""Middleware of Ray's HTTP proxy: its own errors in the body format of the APIs.

The proxy answers a request whose frontend died with a plain-text 500, which clients that read JSON cannot parse. Ray
calls `middlewares` in the proxy's process, by the environment variable that `lifecycle.py` sets.
"""

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.errors import EngineStopped
from shoal.server.error_responses import send_error

RAY_PATHS = "/-/"  # Ray's health check and list of routes


def middlewares() -> list[Middleware]:
    return [Middleware(JsonErrors)]


class JsonErrors:
    """Answers with a retryable 503 in place of the proxy's own errors and of requests that end without a response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(RAY_PATHS):
            await self._app(scope, receive, send)
            return
        started = False

        async def send_unless_replaced(message: Message) -> None:
            nonlocal started
            if not started and message["type"] == "http.response.start":
                started = not is_proxy_error(message)
            if started:
                await send(message)

        await self._app(scope, receive, send_unless_replaced)
        if not started:
            problem = EngineStopped("the frontend that served this request stopped; send the request again")
            await send_error(scope, receive, send, problem)


def is_proxy_error(start: Message) -> bool:
    """Return whether the proxy made this response: errors of our application are never plain text."""
    return start["status"] >= 500 and Headers(raw=start["headers"]).get("content-type", "").startswith("text/plain")
