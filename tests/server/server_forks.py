"""Server processes that start quickly.

Importing the server takes most of a CPU second. One process per pytest worker imports it once, and each server is a
fork of it with an environment and an output of its own. Without torch, which a server process does not import.
"""

import atexit
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
PRELOADED = ("shoal.cli.serving.serve", "shoal.server.run", "tests.server.engine_forks", "tests.server.launch")
REQUEST_BYTES = 1 << 20


class ForkedServer:
    """A server process that is not a child of this one, with the methods of `subprocess.Popen` that tests call."""

    def __init__(self, arguments: list[str], out: IO[bytes], env: dict[str, str], kept: int) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self._status, sent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with sent:
            request = json.dumps({"arguments": arguments, "env": env}).encode()
            socket.send_fds(fork_process(), [request], [sent.fileno(), out.fileno(), kept])
        self.pid = int(self._status.recv(64))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal. Raises TimeoutExpired."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(64))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@cache
def fork_process() -> socket.socket:
    """Start the process that forks; return the socket of its requests, which ends it when it is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.server.server_forks", str(theirs.fileno())]
        env = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        env["OMP_NUM_THREADS"] = "1"
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], env=env)
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


def receive_requests(requests: socket.socket) -> dict[str, Any]:
    """Fork for every request; return its settings in the fork, and exit where there are no more requests."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 3)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            become_child(*descriptors[:2])
            return {**json.loads(request), "kept": descriptors[2]}
        for descriptor in descriptors:
            os.close(descriptor)


def become_child(status: int, out: int) -> None:
    """Fork once more: one process reports the exit code of the other, which returns with its output connected."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        os.write(status, str(child).encode())
        os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard in (1, 2):
        os.dup2(out, standard)
    os.close(status)
    os.close(out)


def reap(*_: object) -> None:
    """Wait for the forks that have ended, so that their CPU time counts as that of the tests."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        import_module(name)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, reap)
    settings = receive_requests(requests)
    os.environ.clear()
    os.environ.update(settings["env"])
    sys.argv[1:] = settings["arguments"]
    from tests.server import engine_forks, launch

    if engine_forks.ADDRESS in os.environ:
        _, _, address = os.environ[engine_forks.ADDRESS].partition(":")
        os.environ[engine_forks.ADDRESS] = f"{settings['kept']}:{address}"
    launch.run()


if __name__ == "__main__":
    main()
