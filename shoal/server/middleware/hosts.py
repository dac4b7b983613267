"""Refuse requests whose Host header names another machine.

A web page can make its own name resolve to 127.0.0.1 (DNS rebinding); the browser then takes this server for the
page's own origin. The Host header still has the page's name. IP addresses cannot be rebound, and programs may send no
Host header, so both pass. Servers with keys or on other addresses than loopback are often reached by names that they
do not know; their requests are checked only if `allowed_hosts` is set.
"""

from collections.abc import Callable
from functools import lru_cache
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.api.exceptions import UnknownHost
from shoal.server.error_responses import send_error

PROBES = ("/health", "/ready", "/ping")  # load balancers send health probes with any name
ANY = "*"
LOCAL = "localhost"
REJECTION = "this server is not known as {host!r}; add the name to allowed_hosts to allow it"


class HostMiddleware:
    """Rejects unknown names with a 403 if `allowed` is set, or while `is_open()`: no key protects the server."""

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...], is_open: Callable[[], bool]) -> None:
        self._app, self._is_open = app, is_open
        self._allowed = tuple(name.lower() for name in allowed)
        self._is_known = lru_cache(maxsize=64)(self._check_host)  # clients send the same few headers again and again

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] not in PROBES and self._checks():
            for host in (value.decode("latin-1") for name, value in scope["headers"] if name == b"host"):
                if not self._is_known(host):
                    await send_error(scope, receive, send, UnknownHost(REJECTION.format(host=host[:128])))
                    return
        await self._app(scope, receive, send)

    def _checks(self) -> bool:
        return ANY not in self._allowed and (bool(self._allowed) or self._is_open())

    def _check_host(self, host: str) -> bool:
        name = host_name(host)
        if name in ("", LOCAL, *self._allowed) or name.endswith("." + LOCAL) or _is_address(name):
            return True
        return any(pattern.startswith("*.") and name.endswith(pattern[1:]) for pattern in self._allowed)


def host_name(host: str) -> str:
    """Return the name or address of a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].strip().lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
