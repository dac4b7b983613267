"""User directories, atomic file writes, file locks, file systems and process memory, on Linux, macOS and Windows."""

import errno
import os
import re
import secrets
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import OutputError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl
    import resource

# File systems on this machine's disks and in its memory. Access to any other may wait for a network.
LOCAL_FILE_SYSTEMS = frozenset(
    ("btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "squashfs", "tmpfs", "xfs", "zfs")
)
PARTIAL_FILES = ".shoal-*.part"  # glob for the temporary files of AtomicFile, which a killed process leaves behind


def config_directory() -> Path:
    return _user_directory("XDG_CONFIG_HOME", ".config")


def data_directory() -> Path:
    return _user_directory("XDG_DATA_HOME", ".local/share")


def state_directory() -> Path:
    return _user_directory("XDG_STATE_HOME", ".local/state")


def cache_directory() -> Path:
    return _user_directory("XDG_CACHE_HOME", ".cache")


def _user_directory(variable: str, default: str) -> Path:
    """Return this user's Shoal directory, which may not exist yet. Raises RuntimeError for a user without a home."""
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / default) / "shoal"


def is_local(path: Path) -> bool:
    """Return whether a path, which need not exist, and all below it are on local file systems; False if unknown."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # not Linux
        return False
    return file_systems(os.path.realpath(path), mounts) <= LOCAL_FILE_SYSTEMS


def file_systems(path: str, mounts: str) -> set[str]:
    """Return the types of the file systems at and below a resolved path; `mounts` is /proc/self/mountinfo's content."""
    deepest, file_system, nested = "", "", set[str]()
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), mount.split(" ")[4])
        found = source.split(" ")[0]
        if _contains(point, path) and len(point) >= len(deepest):  # a later mount at the same point hides the earlier
            deepest, file_system = point, found
        elif _contains(path, point):
            nested.add(found)
    return nested | {file_system}


def _contains(directory: str, path: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


class AtomicFile:
    """Temporary file that replaces `path` when it is committed: readers see the old or the complete new content.

    `file` is open for reading and writing. `private` makes the result readable by its owner only. All methods but
    `discard` raise OSError.
    """

    def __init__(self, path: Path, *, private: bool = False) -> None:
        self._path = path
        self._temporary = path.with_name(f".shoal-{secrets.token_hex(8)}.part")
        # Registered before the file exists: an interrupt may arrive before the caller can discard it.
        self._remove = weakref.finalize(self, _remove_own, self._temporary, os.getpid())
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self.file = os.fdopen(os.open(self._temporary, flags, _mode(private)), "w+b")

    def commit(self) -> None:
        self.file.flush()
        # Some file systems report a full disk only here, and the name must not become visible before the content.
        os.fsync(self.file.fileno())
        self.file.close()
        self._temporary.replace(self._path)
        self._remove.detach()

    def discard(self) -> None:
        """Remove the temporary file. Does nothing after `commit`; never raises."""
        with suppress(OSError):
            self.file.close()
        self._remove()


def _remove_own(path: Path, process: int) -> None:
    """Remove a temporary file, unless this process is a fork of the one that created it."""
    if os.getpid() == process:
        with suppress(OSError):
            path.unlink()


def atomic_write(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write and sync a whole file, replacing an existing one. Raises OutputError."""
    with output_errors(path):
        target = AtomicFile(path, private=private)
        try:
            target.file.write(content)
            target.commit()
        finally:
            target.discard()


def sync_directory(path: Path) -> None:
    """Sync a directory, so that files created or renamed in it survive a power loss. Raises OSError.

    Does nothing on file systems that cannot sync directories, such as the shared folders of VirtualBox.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


@contextmanager
def file_lock(path: Path, *, shared: bool = False, wait: bool = True, private: bool = False) -> Iterator[None]:
    """Hold an advisory lock on a file, which is created if missing, or on a directory.

    Processes and threads exclude each other; holders with `shared` only exclude exclusive ones. Raises BlockingIOError
    when the lock is held and `wait` is false, OSError when the file system has no locks. Windows has neither shared
    locks nor locks on directories: both are an OSError there.
    """
    fd = _open_for_lock(path, private)
    try:
        _lock(fd, shared, wait)
        yield
    finally:
        os.close(fd)  # releases the lock


def _open_for_lock(path: Path, private: bool) -> int:
    if path.is_dir():
        return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0))
    return os.open(path, os.O_RDWR | os.O_CREAT, _mode(private))


if sys.platform == "win32":

    def _lock(fd: int, shared: bool, wait: bool) -> None:
        if shared:
            raise OSError(errno.ENOTSUP, "shared file locks are not supported on Windows")
        try:
            msvcrt.locking(fd, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(errno.EAGAIN, "the file is locked by another process") from error

else:

    def _lock(fd: int, shared: bool, wait: bool) -> None:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


@contextmanager
def output_errors(output: object) -> Iterator[None]:
    """Turn an OSError inside the block into an OutputError that names `output`, a path or a description."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error


def rss_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process, by default this one; 0 if it has ended or the system has no /proc."""
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:")), 0)


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process; 0 on Windows."""
    if sys.platform != "win32":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return 0


def _mode(private: bool) -> int:
    return 0o600 if private else 0o666
