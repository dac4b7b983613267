"""Engine processes that start quickly."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from shoal.engine.process import engine_process


@contextmanager
def forking() -> Iterator[None]:
    """Fork engine processes from a process that has imported the engine, which is most of the work of a start.

    Not for tests that act while an engine starts or that look at its exit code. tests/server starts engines as
    production does.
    """
    multiprocessing.set_forkserver_preload(["shoal.engine.process.worker", "shoal.engine.load", "shoal.engine.service"])
    forkserver = SimpleNamespace(get_context=lambda method: multiprocessing.get_context("forkserver"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "multiprocessing", forkserver)
        yield


@pytest.fixture
def forked_engines() -> Iterator[None]:
    with forking():
        yield
