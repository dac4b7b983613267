from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import Serving, start
from tests.server.conftest import recording as recording


@pytest.fixture(scope="session")
def site_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Server that stands for http://localhost:8080 in the pages."""
    serving = start(tmp_path_factory.mktemp("docs"), model="nano")
    yield serving
    serving.end()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty directory, without proxies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("SHOAL_VOICES", str(tmp_path / "voices"))
    return tmp_path
