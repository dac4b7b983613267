"""Listening sockets of servers."""

import socket
from contextlib import ExitStack

from shoal.errors import InvalidRequest

LISTEN_BACKLOG = 512  # connections that the kernel queues before they are accepted


def listen(host: str, port: int, flags: str) -> socket.socket:
    """Return a listening socket. Raises InvalidRequest, which names the `flags` that select another address."""
    with ExitStack() as undo:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(LISTEN_BACKLOG)
        except OSError as problem:
            cause = problem.strerror or str(problem)
            raise InvalidRequest(f"cannot listen on {host} port {port}: {cause}; choose others with {flags}") from None
        undo.pop_all()
        return listener
