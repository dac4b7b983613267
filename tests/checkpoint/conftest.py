"""Small checkpoints on disk, for tests that load or damage them, and a fake Hugging Face hub on loopback."""

import shutil
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import random_checkpoint
from shoal.checkpoint.save import save_random
from tests.checkpoint.fake_hub import FakeHub, HubRequestHandler


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny: Checkpoint, tiny_s2: Checkpoint) -> Path:
    """Directory with `s1` and `s2`, fp32 checkpoints in the released layout of their family. Read-only."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save_random(folder / "s1", tiny)
    save_random(folder / "s2", tiny_s2, shard_bytes=100_000)
    return folder


@pytest.fixture
def s1(saved: Path, tmp_path: Path) -> Path:
    """Copy that the test may modify."""
    return Path(shutil.copytree(saved / "s1", tmp_path / "s1"))


@pytest.fixture
def s2(saved: Path, tmp_path: Path) -> Path:
    """Copy that the test may modify."""
    return Path(shutil.copytree(saved / "s2", tmp_path / "s2"))


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random bf16 model in the S1 layout. Read-only."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_random(directory, random_checkpoint("tiny"))
    return directory


@pytest.fixture(scope="session")
def tiny_s2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random bf16 model in the S2 layout, several shards. Read-only."""
    directory = tmp_path_factory.mktemp("models") / "tiny-s2"
    save_random(directory, random_checkpoint("tiny-s2"), shard_bytes=100_000)
    return directory


@pytest.fixture
def fake_hub(tiny_s2_directory: Path) -> Iterator[FakeHub]:
    """Hub that serves the S2 model and three files that a pull does not need."""
    hub = FakeHub({file.name: file.read_bytes() for file in tiny_s2_directory.iterdir()})
    hub.files |= {"README.md": b"# tiny", "model.pth": b"another form of the same", "samples/one.wav": b"RIFF"}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OneHubRequestHandler", (HubRequestHandler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()
