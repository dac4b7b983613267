"""Engine processes that start quickly, for servers in processes of their own.

Importing torch and the engine takes two CPU seconds, most of the start of a server. One process per pytest worker
imports them once, and each engine is a fork of it with the environment, directory and output of its server.
"""

import multiprocessing
import os
import sys
from functools import cache
from multiprocessing import forkserver, reduction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shoal.engine.process import engine_process

PRELOADED = [
    "shoal.engine.process.worker",
    "shoal.engine.load",
    "shoal.engine.native_engine",
    "shoal.engine.service",
    "shoal.cli.serving.serve",
]
ADDRESS, PROCESSES = "ENGINE_FORK_SERVER", "ENGINE_FORKS"
# Later versions authenticate connections to the process that forks with a key of its starter.
POSSIBLE = sys.platform == "linux" and sys.version_info < (3, 14)


@cache
def fork_server() -> tuple[str, int]:
    """Start the process that forks; return the address of its socket, and the descriptor that keeps it running."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    found: Any = forkserver._forkserver  # type: ignore[attr-defined]
    return found._forkserver_address, found._forkserver_alive_fd


def forking_environment(home: Path) -> dict[str, str]:
    """Return the variables with which a server forks its engines; their ids become names of files in `home`."""
    (home / PROCESSES).mkdir(exist_ok=True)
    address, descriptor = fork_server()
    return {ADDRESS: f"{descriptor}:{address}", PROCESSES: str(home / PROCESSES)}


def forks(home: Path) -> list[int]:
    """Return the ids of the running engines that a server with this home has forked, the oldest first."""
    files = sorted((home / PROCESSES).iterdir(), key=lambda file: file.stat().st_mtime_ns)
    return [int(file.name) for file in files if file.read_text() == start_time(file.name)]


def start_time(process: object) -> str:
    """Return when a process started, which distinguishes it from a later one with its id; "" if it has exited."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def fork_engines() -> None:
    """Fork the engines of this process if `forking_environment` says so."""
    if ADDRESS not in os.environ:
        return
    found: Any = forkserver._forkserver  # type: ignore[attr-defined]
    descriptor, _, found._forkserver_address = os.environ.pop(ADDRESS).partition(":")
    found._forkserver_alive_fd, found.ensure_running = int(descriptor), lambda: None
    context = multiprocessing.get_context("forkserver")

    def process(*, target: Any, args: tuple[Any, ...], **options: Any) -> Any:
        surroundings = dict(os.environ), str(Path.cwd()), Output()
        return context.Process(target=run_as_child, args=(*surroundings, target, args), **options)

    engine_process.multiprocessing = SimpleNamespace(  # type: ignore[assignment]
        get_context=lambda method: SimpleNamespace(Pipe=context.Pipe, Process=process)
    )


class Output:
    """Standard error of a process; when it is sent to another one, it becomes a file descriptor there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return received, (reduction.DupFd(sys.stderr.fileno()),)


def received(descriptor: Any) -> int:
    return int(descriptor.detach())


def run_as_child(
    environment: dict[str, str], directory: str, output: int, target: Any, arguments: tuple[Any, ...]
) -> None:
    """Run the main function of an engine as if its server had started the process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    for standard in (1, 2):
        os.dup2(output, standard)
    Path(environment[PROCESSES], str(os.getpid())).write_text(start_time("self"))
    target(*arguments)
