from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from shoal.checkpoint.random import random_checkpoint
from shoal.checkpoint.save import save_random
from tests.checkpoint_cli.loopback_hub import Answers, FakeHub


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in S1's layout on disk."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_random(directory, random_checkpoint("tiny"))
    return directory


@pytest.fixture(scope="session")
def tiny_s2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in S2's layout, in several shards."""
    directory = tmp_path_factory.mktemp("models") / "tiny-s2"
    save_random(directory, random_checkpoint("tiny-s2"), shard_bytes=100_000)
    return directory


@pytest.fixture
def fake_hub(tiny_s2_directory: Path) -> Iterator[FakeHub]:
    hub = FakeHub({file.name: file.read_bytes() for file in tiny_s2_directory.iterdir()})
    hub.files |= {"README.md": b"# tiny", "model.pth": b"another form of the same", "samples/one.wav": b"RIFF"}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("AnswersOfOneHub", (Answers,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()
