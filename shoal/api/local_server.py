"""Registry of the servers that this user runs on this machine, so that `shoal say` can use one.

A server with a registry entry also listens on a Unix socket beside it. The directory belongs to the user and is closed
to others, so no other user can put a socket there or connect to one: text is never sent to a server of another user, as
it could be through a port that another process has taken over. Python on Windows has no Unix sockets: no registry.
"""

import errno
import json
import logging
import os
import socket
import stat
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal import __version__
from shoal.checkpoint.find import RANDOM_PREFIX, find_directory
from shoal.config import EngineConfig
from shoal.errors import OutputError
from shoal.paths import atomic_write, state_directory

logger = logging.getLogger(__name__)

BACKLOG = 64
MAX_ENTRY_BYTES = 1 << 16
# Settings of the engine that the audio depends on.
AUDIO_SETTINGS = ("quantize", "kv_dtype", "backend", "guard", "retries", "turn_retries", "context_tokens")


@dataclass(frozen=True)
class EngineIdentity:
    """Everything except the request that audio depends on. Equal identities give the same audio."""

    model: str  # directory, or the name of random weights
    modified: int  # time of the newest file of the model, ns
    version: str = __version__
    device: str = "auto"
    dtype: str | None = None
    codec: str | None = None
    lexicon: str | None = None
    voices: str = ""
    settings: dict[str, object] = field(default_factory=dict)


def engine_identity(
    model: str,
    voices: Path,
    *,
    device: str = "auto",
    dtype: str | None = None,
    codec: Path | None = None,
    lexicon: Path | None = None,
    config: EngineConfig | None = None,
) -> EngineIdentity:
    """Return the identity of an engine that would be loaded now. Raises ModelNotFound."""
    directory = None if model.startswith(RANDOM_PREFIX) else find_directory(model).resolve()
    newest = max((path.lstat().st_mtime_ns for path in directory.iterdir()), default=0) if directory else 0
    chosen = config or EngineConfig()
    return EngineIdentity(
        model if directory is None else str(directory),
        newest,
        device=device,
        dtype=dtype,
        codec=None if codec is None else str(codec.resolve()),
        lexicon=None if lexicon is None else str(lexicon.resolve()),
        voices=str(voices.resolve()),
        settings={
            **{name: getattr(chosen, name) for name in AUDIO_SETTINGS},
            "baseline": chosen.cpu_isa == "baseline",  # the other instruction sets give the same bits
        },
    )


@dataclass(frozen=True)
class LocalServer:
    """Registry entry of a running server."""

    pid: int
    host: str  # host name of the machine, because machines may share a home directory
    url: str  # address for browsers and other clients
    model: str  # value of the server's setting `model`
    requires_key: bool  # as of the start of the server
    identity: EngineIdentity
    socket: Path


def registry_directory() -> Path:
    return state_directory() / "servers"


@contextmanager
def registered(url: str, model: str, identity: EngineIdentity, *, requires_key: bool) -> Iterator[socket.socket | None]:
    """Register this process inside the block; yields a listening Unix socket.

    Yields None where that is not possible: a read-only home directory, a long path, Windows. The log then says why.
    """
    try:
        entry, listener = _register(url, model, identity, requires_key)
    except (OSError, OutputError, RuntimeError, AttributeError) as problem:
        logger.info("`shoal say` will not find this server: %s", problem)
        yield None
        return
    try:
        yield listener
    finally:
        listener.close()
        _remove(entry)


def _register(url: str, model: str, identity: EngineIdentity, requires_key: bool) -> tuple[Path, socket.socket]:
    directory = registry_directory()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory.chmod(0o700)
    if not _is_private(directory):
        raise OSError(f"{directory} does not belong to this user")
    host = socket.gethostname()
    entry = directory / f"{os.getpid()}-{zlib.crc32(host.encode()):08x}.json"
    path = entry.with_suffix(".sock")
    path.unlink(missing_ok=True)  # left by a dead process that had this id
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with ExitStack() as on_error:
        on_error.callback(_remove, entry)
        on_error.callback(listener.close)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
        server = LocalServer(os.getpid(), host, url, model, requires_key, identity, path)
        atomic_write(entry, json.dumps(asdict(server) | {"socket": path.name}).encode(), private=True)
        on_error.pop_all()
    return entry, listener


def find_server(identity: EngineIdentity) -> LocalServer | None:
    """Return a registered server of this user and machine with that identity; None if there is none."""
    directory = registry_directory()
    if not hasattr(socket, "AF_UNIX") or not _is_private(directory):
        return None
    servers = (_read(entry) for entry in sorted(directory.glob("*.json")))
    return next((server for server in servers if server is not None and server.identity == identity), None)


def connect(server: LocalServer, timeout: float) -> socket.socket:
    """Return a connection to a server. Raises OSError; the entry of a dead server is removed."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        connection.connect(str(server.socket))
    except OSError as problem:
        connection.close()
        if problem.errno in (errno.ECONNREFUSED, errno.ENOENT):
            _remove(server.socket.with_suffix(".json"))
        raise
    return connection


def _read(entry: Path) -> LocalServer | None:
    """Return an entry of this machine; None for one that cannot be read."""
    try:
        with entry.open("rb") as file:
            content = json.loads(file.read(MAX_ENTRY_BYTES))
        path = entry.with_name(Path(content["socket"]).name)
        identity = EngineIdentity(**content["identity"])
        server = LocalServer(**{**content, "identity": identity, "socket": path})
        usable = server.host == socket.gethostname() and stat.S_ISSOCK(path.lstat().st_mode)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return server if usable else None


def _is_private(directory: Path) -> bool:
    """Return whether a directory, not a link to one, belongs to this user and is closed to others."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _remove(entry: Path) -> None:
    for path in (entry, entry.with_suffix(".sock")):
        with suppress(OSError):
            path.unlink(missing_ok=True)
