"""A small model on disk, and server states with an engine in this process."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.checkpoint.random import random_checkpoint
from shoal.checkpoint.save import save_random

ROOT = Path(__file__).parents[2]
# Long enough to be streamed in several pieces, and short.
SAY = {"text": "Hello there.", "seed": 3, "max_new_tokens": 40}


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_random(directory, random_checkpoint("tiny"))
    return directory


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    home = tmp_path_factory.mktemp("home")
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(home))
    # The speech guard rejects the noise that random weights generate.
    monkeypatch.setenv("SHOAL_GUARD", "false")
    yield
    shutil.rmtree(home, ignore_errors=True)
