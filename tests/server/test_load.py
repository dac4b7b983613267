"""Concurrent clients: no response is lost or mixed up. `python -m tests.server.crowd` runs a longer version."""

import asyncio

import httpx
import pytest

from tests.server.conftest import Serving
from tests.server.crowd import Crowd, wait_until_settled
from tests.server.test_lifecycle import ENDLESS


def test_sixteen_concurrent_clients_get_the_same_audio_as_alone(server: Serving) -> None:
    crowd = Crowd(server, seed=1)
    crowd.learn(20)
    asyncio.run(crowd.run(requests=60, clients=16))
    assert (crowd.received + crowd.disconnected, crowd.different) == (60, 0)
    assert crowd.disconnected > 3
    wait_until_settled(server)


def test_a_disconnect_frees_the_slot(server: Serving) -> None:
    with server.client() as http:
        with http.stream(
            "POST", "/v1/tts", json={"text": "Hello.", "max_new_tokens": 900, "streaming": True, "seed": 12}
        ) as answer:
            next(answer.iter_bytes())
        wait_until_settled(server)


def test_a_whole_response_is_cancelled_on_disconnect(server: Serving) -> None:
    with server.client() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/tts", json={**ENDLESS, "streaming": False}, timeout=0.4)
    wait_until_settled(server)
