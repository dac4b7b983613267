"""A server with nano that the published clients of other services talk to."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.server.conftest import Serving, free_port, start

KEY = "a-key-of-the-tests"
# `make test` installs what is not in the `dev` extra.
collect_ignore = [] if find_spec("pipecat") else ["test_pipecat.py", "test_pipecat_elevenlabs.py"]


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    home = tmp_path_factory.mktemp("clients")
    # `wyoming-openai` and some versions of Open WebUI list the voices without the key.
    settings = {"api_keys": KEY, "public_voices": True, "wyoming_port": free_port()}
    serving = start(home, model="nano", slots=4, **settings)
    yield serving
    assert serving.end() == 0, serving.log.read_text()
