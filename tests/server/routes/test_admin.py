"""The operator's routes: with a key of their own, or not at all."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from shoal.api.config import Limits, ServerConfig
from shoal.server.app import create_app
from tests.server.standin import Standin, state_with

ADMIN_KEY = "the-key-of-the-operator"
ROUTE = "/v1/admin/release-memory"


class Releasing(Standin):
    """An engine that reports what it has released."""

    async def release_memory(self) -> dict[str, int]:
        return {"prefix_blocks": 3}


def post(service: Standin, voices: Path, config: ServerConfig, key: str = "") -> httpx.Response:
    state = state_with(service, Limits(), voices)
    state.config = replace(config, limits=Limits())
    app = create_app(state)

    async def ask() -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            return await http.post(ROUTE, headers=headers)

    return asyncio.run(ask())


def test_the_operator_releases_memory(tmp_path: Path) -> None:
    answer = post(Releasing(), tmp_path, ServerConfig(admin_key=ADMIN_KEY), ADMIN_KEY)
    assert (answer.status_code, answer.json()) == (200, {"prefix_blocks": 3})


@pytest.mark.parametrize("key", ["", "an-api-key-of-a-client", ADMIN_KEY[:-1], f"{ADMIN_KEY}x"])
def test_others_are_refused(tmp_path: Path, key: str) -> None:
    config = ServerConfig(admin_key=ADMIN_KEY, api_keys=("an-api-key-of-a-client",))
    answer = post(Releasing(), tmp_path, config, key)
    assert answer.status_code == 401
    assert "admin_key" in answer.text


def test_without_the_setting_there_is_no_such_route(tmp_path: Path) -> None:
    assert post(Releasing(), tmp_path, ServerConfig(), ADMIN_KEY).status_code == 404


def test_an_engine_that_cannot_release_memory_says_so(tmp_path: Path) -> None:
    answer = post(Standin(), tmp_path, ServerConfig(admin_key=ADMIN_KEY), ADMIN_KEY)
    assert answer.status_code == 400
    assert "restart a replica" in answer.text
