"""Codec of the golden data: small, but with windowed transformers in encoder and decoder."""

import shutil
from pathlib import Path

import pytest

from shoal.checkpoint.load import load_codec
from shoal.codec.dac import Codec


@pytest.fixture(scope="session")
def codec(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder = tmp_path_factory.mktemp("codec")
    shutil.copy(golden / "codec" / "config.json", folder / "codec.json")
    shutil.copy(golden / "codec" / "codec.pth", folder)
    return load_codec(folder)
