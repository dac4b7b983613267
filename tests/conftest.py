"""Set-up of all tests: marks, order of files, golden data and small models."""

import contextlib
import gc
import os
import signal
from pathlib import Path

import pytest
import torch

# Read when Triton is first imported: without a GPU its kernels run in Python, slowly and exactly.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from shoal.kernels import jit

# Tiles of a smaller card on this one; set before the kernels import the function. 101376 is an RTX 30, 40 or 50.
if forced_limit := os.environ.get("SHOAL_TEST_SHARED_MEMORY"):
    jit.shared_memory_limit = lambda device: int(forced_limit)

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import random_checkpoint
from tests import slow

if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):  # Triton is not installed everywhere
        from tests.interpreter import speed_up

        speed_up()

# No example has a time limit: on a busy machine any may take long. Not installed where only the GPU tests run.
with contextlib.suppress(ImportError):
    import hypothesis

    hypothesis.settings.register_profile("shoal", deadline=None)
    hypothesis.settings.load_profile("shoal")

# Imports and collected tests live until the end: they are excluded from garbage collection (`pytest_runtestloop`).
gc.disable()

# A shell that starts pytest in the background makes it ignore SIGINT, and the processes that tests start inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The models of the tests are too small for several threads: the second would only wait for the first.
torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave slow files out of a run without slow tests before they import the libraries that only they need."""
    unwanted = config.getoption("markexpr") == "not slow" and collection_path.suffix == ".py"
    return True if unwanted and slow.is_slow(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: slow.order(item.path))
    for item in items:
        if slow.is_slow(item.path):
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Keep the files of a folder whose tests share a server on one worker: each worker would start its own."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SharedServers(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return slow.scope(nodeid)

    return SharedServers(config, log)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail a test that changed the SIGINT handler: processes started by later tests would inherit an ignored signal."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pytest.fail(f"{item.nodeid} changed what an interrupt does")


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def tiny() -> Checkpoint:
    """Return a small random model in fp32."""
    return random_checkpoint("tiny", dtype=torch.float32)


@pytest.fixture(scope="session")
def tiny_s2() -> Checkpoint:
    return random_checkpoint("tiny-s2", dtype=torch.float32)
