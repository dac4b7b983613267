"""DNS rebinding: a server without keys on loopback accepts only its own host names."""

import asyncio
from pathlib import Path

import httpx
import pytest

from shoal.api.config import ServerConfig
from shoal.api.engine_client import EngineHandle, EngineLifecycle
from shoal.api.state import create_state
from shoal.cluster.balancer.app import create_balancer
from shoal.cluster.balancer.config import BalancerConfig, WorkerAddress
from shoal.server.app import create_app
from shoal.voices.store import VoiceStore
from tests.server.standin import Standin

LOOPBACK = ServerConfig()
KEYED = ServerConfig(api_keys=("secret-key-of-sixteen",))
PUBLIC = ServerConfig(host="0.0.0.0", insecure=True)
NAMED = ServerConfig(allowed_hosts=("Voice.example", "*.internal"))
KEYED_NAMED = ServerConfig(api_keys=("secret-key-of-sixteen",), allowed_hosts=("voice.example",))
ANY = ServerConfig(allowed_hosts=("*",))


def status(config: ServerConfig, folder: Path, host: str, method: str = "GET", path: str = "/v1/models") -> int:
    engine = EngineHandle(Standin(), VoiceStore(folder), 25.0)
    app = create_app(create_state(config, EngineLifecycle(lambda: engine, engine), 4))

    async def ask() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            headers = {"host": host, "authorization": "Bearer secret-key-of-sixteen"}
            return (await http.request(method, path, headers=headers)).status_code

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("config", "host", "expected"),
    [
        (LOOPBACK, "evil.example", 403),
        (LOOPBACK, "evil.example:8080", 403),
        (LOOPBACK, "localhost.evil.example", 403),
        (LOOPBACK, "127.0.0.1.evil.example", 403),
        (LOOPBACK, "evillocalhost", 403),
        (LOOPBACK, "localhost:8080", 200),
        (LOOPBACK, "LOCALHOST.", 200),
        (LOOPBACK, "shoal.localhost", 200),
        (LOOPBACK, "127.0.0.1:8080", 200),
        (LOOPBACK, "[::1]:8080", 200),
        (LOOPBACK, "192.168.1.7", 200),
        (LOOPBACK, "", 200),
        (KEYED, "evil.example", 200),
        (PUBLIC, "evil.example", 200),
        (NAMED, "evil.example", 403),
        (NAMED, "voice.example:443", 200),
        (NAMED, "a.internal", 200),
        (NAMED, "internal", 403),
        (KEYED_NAMED, "evil.example", 403),
        (KEYED_NAMED, "voice.example", 200),
        (ANY, "evil.example", 200),
    ],
)
def test_only_known_names_are_accepted(config: ServerConfig, host: str, expected: int, tmp_path: Path) -> None:
    assert status(config, tmp_path, host) == expected


def test_a_same_origin_request_of_a_rebound_name_is_refused(tmp_path: Path) -> None:
    assert status(LOOPBACK, tmp_path, "evil.example", "POST", "/v1/tts") == 403


@pytest.mark.parametrize(
    ("host", "allowed", "expected"),
    [("127.0.0.1", (), 403), ("0.0.0.0", (), 503), ("127.0.0.1", ("evil.example",), 503), ("0.0.0.0", ("other",), 403)],
)
def test_a_balancer_checks_what_its_workers_do_not_see(host: str, allowed: tuple[str, ...], expected: int) -> None:
    """A balancer without ready workers: requests that pass the check get a 503."""
    config = BalancerConfig((WorkerAddress("http://127.0.0.1:1"),), host, allowed_hosts=allowed)

    async def ask() -> int:
        transport = httpx.ASGITransport(create_balancer(config))
        async with httpx.AsyncClient(transport=transport, base_url="http://evil.example") as http:
            return (await http.post("/v1/tts", json={"text": "Hello."})).status_code

    assert asyncio.run(ask()) == expected


def test_probes_may_have_any_name(tmp_path: Path) -> None:
    assert status(LOOPBACK, tmp_path, "evil.example", path="/health") == 200
