"""One copy of the user directories, atomic writes, file locks and memory readings."""

import gc
import os
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from shoal.errors import OutputError
from shoal.paths import (
    PARTIAL_FILES,
    AtomicFile,
    atomic_write,
    cache_directory,
    config_directory,
    data_directory,
    file_lock,
    file_systems,
    is_local,
    output_errors,
    peak_rss_bytes,
    rss_bytes,
    state_directory,
    sync_directory,
)

DIRECTORIES = [
    (config_directory, "XDG_CONFIG_HOME", ".config"),
    (data_directory, "XDG_DATA_HOME", ".local/share"),
    (state_directory, "XDG_STATE_HOME", ".local/state"),
    (cache_directory, "XDG_CACHE_HOME", ".cache"),
]


@pytest.mark.parametrize(("directory", "variable", "default"), DIRECTORIES)
def test_directories_follow_the_xdg_variables_and_default_to_the_home(
    monkeypatch: pytest.MonkeyPatch, directory: Callable[[], Path], variable: str, default: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv(variable, "/elsewhere")
    assert directory() == Path("/elsewhere/shoal")
    for unset in (lambda: monkeypatch.setenv(variable, ""), lambda: monkeypatch.delenv(variable)):
        unset()
        assert directory() == Path("/home/me") / default / "shoal"


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    for content in (b"old", b"new"):
        atomic_write(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_only_private_files_are_hidden_from_other_users(tmp_path: Path, private: bool, mode: int) -> None:
    before = os.umask(0o022)
    try:
        atomic_write(tmp_path / "file", b"", private=private)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_failed_write_keeps_the_old_file_and_removes_the_partial_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def full_disk(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OutputError, match=r"cannot write .*file: No space left on device"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_directory_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file or directory"):
        atomic_write(tmp_path / "missing" / "file", b"")


def test_a_partial_file_is_invisible_until_it_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    target = AtomicFile(path)
    target.file.write(b"RIFF")
    assert not path.exists()
    assert len(list(tmp_path.glob(PARTIAL_FILES))) == 1
    target.commit()
    target.discard()
    assert path.read_bytes() == b"RIFF"
    assert list(tmp_path.iterdir()) == [path]


def test_a_discarded_file_leaves_no_trace(tmp_path: Path) -> None:
    target = AtomicFile(tmp_path / "speech.wav")
    target.file.write(b"RIFF")
    target.discard()
    target.discard()
    assert list(tmp_path.iterdir()) == []


def test_output_errors_name_what_could_not_be_written() -> None:
    with pytest.raises(OutputError) as error, output_errors("standard output"):
        raise BrokenPipeError(32, "Broken pipe")
    assert str(error.value) == "cannot write standard output: Broken pipe"


@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_an_exclusive_lock_excludes_all_others(tmp_path: Path, directory: bool) -> None:
    path = tmp_path if directory else tmp_path / "lock"
    with file_lock(path):
        for shared in (False, True):
            with pytest.raises(BlockingIOError), file_lock(path, shared=shared, wait=False):
                pass
    with file_lock(path, wait=False):
        pass


def test_shared_locks_exclude_exclusive_ones_only(tmp_path: Path) -> None:
    shared = file_lock(tmp_path, shared=True), file_lock(tmp_path, shared=True, wait=False)
    with shared[0], shared[1], pytest.raises(BlockingIOError), file_lock(tmp_path, wait=False):
        pass


def test_a_waiting_lock_is_granted_when_the_holder_releases_it(tmp_path: Path) -> None:
    granted = threading.Event()

    def wait_for_lock() -> None:
        with file_lock(tmp_path / "lock"):
            granted.set()

    waiting = threading.Thread(target=wait_for_lock)
    with file_lock(tmp_path / "lock"):
        waiting.start()
        assert not granted.is_set()
    waiting.join(240)
    assert granted.is_set()


def test_a_private_lock_file_cannot_be_opened_by_other_users(tmp_path: Path) -> None:
    with file_lock(tmp_path / "lock", private=True):
        assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600


def test_a_directory_is_synced_without_a_change(tmp_path: Path) -> None:
    sync_directory(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        sync_directory(tmp_path / "missing")


def test_the_memory_of_a_process_is_measured_while_it_runs() -> None:
    assert rss_bytes() == pytest.approx(rss_bytes(os.getpid()), rel=0.2)
    assert rss_bytes() > 10 << 20
    assert peak_rss_bytes() >= rss_bytes() * 0.9
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(240)
    assert rss_bytes(ended.pid) == 0


def test_an_interrupt_before_the_caller_has_the_file_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        assert list(tmp_path.glob(PARTIAL_FILES))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fdopen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        AtomicFile(tmp_path / "speech.wav")
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_keeps_the_file_of_its_parent(tmp_path: Path) -> None:
    with ExitStack() as stack:
        target = AtomicFile(tmp_path / "speech.wav")
        stack.callback(target.discard)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            child = os.fork()
        if child == 0:
            target.discard()
            os._exit(0)
        os.waitpid(child, 0)
        assert list(tmp_path.glob(PARTIAL_FILES))
    assert not list(tmp_path.iterdir())


MOUNTS = r"""22 1 0:21 / / rw,relatime - overlay overlay rw,lowerdir=/a
23 22 0:22 / /srv rw - ext4 /dev/sda1 rw
24 23 0:23 / /srv/shared\040voices rw - nfs4 host:/voices rw
25 22 0:24 / /mnt rw master:1 - ext4 /dev/sdb1 rw
26 25 0:25 / /mnt rw - fuse.s3fs s3fs rw
"""


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("/home/me/voices", {"overlay"}),
        ("/srv", {"ext4", "nfs4"}),
        ("/srv/voices", {"ext4"}),
        ("/srvvoices", {"overlay"}),
        ("/srv/shared voices/narrator", {"nfs4"}),
        ("/mnt/voices", {"fuse.s3fs"}),
        ("/", {"overlay", "ext4", "nfs4", "fuse.s3fs"}),
    ],
)
def test_the_file_systems_of_a_path_are_that_of_its_deepest_and_last_mount_and_those_below_it(
    path: str, kinds: set[str]
) -> None:
    assert file_systems(path, MOUNTS) == kinds


@pytest.mark.parametrize(("kinds", "local"), [({"tmpfs"}, True), ({"nfs4"}, False), ({"tmpfs", "nfs4"}, False)])
def test_a_path_is_local_only_if_all_its_file_systems_are_known_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: set[str], local: bool
) -> None:
    monkeypatch.setattr("shoal.paths.file_systems", lambda path, mounts: kinds)
    assert is_local(tmp_path / "missing") == (local and sys.platform == "linux")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a directory of /proc")
def test_a_file_system_that_cannot_sync_directories_is_no_error() -> None:
    directory = os.open("/proc/self", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            os.fsync(directory)
    finally:
        os.close(directory)
    sync_directory(Path("/proc/self"))
