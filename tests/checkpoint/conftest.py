"""Small checkpoints on disk, to be loaded and to be broken."""

import shutil
from pathlib import Path

import pytest

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.save import save_random


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny: Checkpoint, tiny_s2: Checkpoint) -> Path:
    """`s1` and `s2`, each in the layout of its family."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save_random(folder / "s1", tiny)
    save_random(folder / "s2", tiny_s2, shard_bytes=100_000)
    return folder


@pytest.fixture
def s1(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(saved / "s1", tmp_path / "s1"))


@pytest.fixture
def s2(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "s2", tmp_path / "s2"))
