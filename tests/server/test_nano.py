"""A server with the bundled model, nano."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.nano import SAMPLE_RATE, VOICES
from tests.server.conftest import Serving, start
from tests.server.crowd import Crowd, wait_until_settled

IN_WORDS = "Room five costs twenty dollars."


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = start(tmp_path_factory.mktemp("nano"), model="nano", slots=4, guard=False)
    yield serving
    assert serving.end() == 0, serving.log.read_text()


@pytest.fixture
def http(nano: Serving) -> httpx.Client:
    return nano.client()


def test_concurrent_clients_get_the_same_audio_as_alone(nano: Serving) -> None:
    crowd = Crowd(nano, seed=3)
    crowd.learn(6)
    asyncio.run(crowd.come(requests=6, clients=6))
    assert (crowd.heard + crowd.left, crowd.different) == (6, 0)
    wait_until_settled(nano)


def test_text_normalisation_can_be_disabled(http: httpx.Client) -> None:
    said = {"text": "Room 5 costs $20.", "seed": 1, "format": "pcm"}
    changes: tuple[dict[str, object], ...] = ({}, {"normalize": True}, {"text": IN_WORDS}, {"normalize": False})
    default, asked, spelled, written = (http.post("/v1/tts", json=said | change).content for change in changes)
    assert len(default) == len(asked) == len(spelled) != len(written)
    openai = {"model": "nano", "voice": "alloy", "input": said["text"], "seed": 1, "response_format": "pcm"}
    openai |= {"sample_rate": SAMPLE_RATE, "normalize": False}
    assert len(http.post("/v1/audio/speech", json=openai).content) == len(written)


def test_builtin_voices_are_found_by_name(http: httpx.Client) -> None:
    names = http.get("/v1/references/list?format=json").json()["reference_ids"]
    assert set(VOICES) <= set(names)
    body = {"model": "nano", "input": "Hello.", "seed": 1, "response_format": "pcm", "max_new_tokens": 8}
    one, other = (http.post("/v1/audio/speech", json=body | {"voice": name}).content for name in VOICES[:2])
    assert one != other
