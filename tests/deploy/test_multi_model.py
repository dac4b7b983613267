"""The container as SageMaker starts it, with many models that come and go."""

import asyncio
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
import pytest

from shoal.api.config import Limits, ServerConfig
from shoal.config import EngineConfig
from shoal.deploy.container import container_settings, is_multi_model
from shoal.deploy.memory import usable_bytes
from shoal.deploy.multi_model import ModelPool, PooledModel, multi_model_app
from shoal.engine.process.worker import EngineSource
from shoal.errors import ShoalError
from tests.deploy.conftest import SAY
from tests.server.conftest import ROOT, Serving, free_port, samples_of, surroundings

# One engine of the small model takes about 600 MB at most; there is room for one, not for two.
SETTINGS = {"SHOAL_MODELS_BYTES": "900MiB", "SHOAL_KV_BYTES": "32MiB", "SHOAL_GUARD": "false", "SHOAL_SLOTS": "4"}

LONG = {**SAY, "max_new_tokens": 200}


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home, port = tmp_path_factory.mktemp("container"), free_port()
    variables = {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_BIND_TO_PORT": str(port)}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal.deploy.container", "serve"],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=surroundings(home) | SETTINGS | variables,
        )
    serving = Serving(process, f"http://127.0.0.1:{port}", home / "log", home)
    serving.wait_until_ready("/ping")
    yield serving.client()
    assert serving.end() == 0, serving.log.read_text()


def test_models_are_loaded_and_unloaded_within_the_memory(container: httpx.Client, tiny_directory: Path) -> None:
    """One story, since each load is a process that starts."""
    url = str(tiny_directory)
    assert container.get("/models").json() == {"models": []}
    missing = container.post("/models/first/invoke", json=SAY, headers={"x-request-id": "find-me"})
    assert (missing.status_code, missing.headers["x-request-id"]) == (404, "find-me")

    loaded = container.post("/models", json={"model_name": "first", "url": url})
    assert loaded.status_code == 200, loaded.text
    assert container.get("/models").json() == {"models": [{"modelName": "first", "modelUrl": url}]}
    assert container.get("/models/first").json() == {"modelName": "first", "modelUrl": url}
    assert container.post("/models", json={"model_name": "first", "url": url}).status_code == 409

    spoken = container.post("/models/first/invoke", json=SAY)
    assert (spoken.status_code, spoken.headers["content-type"]) == (200, "audio/wav")
    assert len(samples_of(spoken.content)) > 1000
    assert len(spoken.headers.get_list("x-request-id")) == 1, "one name, though it went through two applications"
    with container.stream("POST", "/models/first/invoke", json={**SAY, "streaming": True}) as stream:
        assert len(list(stream.iter_raw())) > 1
    assert container.post("/models/first/invoke", json={"text": ""}).status_code == 422

    full = container.post("/models", json={"model_name": "second", "url": url})
    assert full.status_code == 507
    assert "models_bytes" in full.json()["message"]

    whole = samples_of(container.post("/models/first/invoke", json=LONG).content)
    with container.stream("POST", "/models/first/invoke", json={**LONG, "streaming": True}) as stream:
        pieces = stream.iter_raw()
        begun = next(pieces)
        assert container.delete("/models/first").status_code == 200
        received = samples_of(begun + b"".join(pieces))
    assert len(received) == len(whole), "what is being spoken is spoken to its end"
    assert container.get("/models/first").status_code == 404
    assert container.delete("/models/first").status_code == 404
    assert container.post("/models", json={"model_name": "second", "url": url}).status_code == 200
    assert container.post("/models/second/invoke", json=SAY).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model_name": "x", "url": "/nowhere"}, 400),
        ({"model_name": "x"}, 422),
        ([], 422),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused(container: httpx.Client, body: object, status: int) -> None:
    refused = container.post("/models", json=body)
    assert refused.status_code == status
    assert container.get("/ping").status_code == 200


def test_a_directory_without_a_model_is_reported(container: httpx.Client, tmp_path: Path) -> None:
    for model in container.get("/models").json()["models"]:
        container.delete(f"/models/{model['modelName']}")
    refused = container.post("/models", json={"model_name": "empty", "url": str(tmp_path)})
    assert refused.status_code == 500
    assert container.get("/models").json() == {"models": []}


def test_a_full_container_stays_healthy(tmp_path: Path) -> None:
    config = ServerConfig(limits=Limits(connections=0))
    source = EngineSource(device="cpu", voices=tmp_path)

    async def ask(path: str) -> httpx.Response:
        app = multi_model_app(ModelPool(config, source, 1 << 40), config)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            return await http.get(path)

    assert asyncio.run(ask("/ping")).status_code == 200
    full = asyncio.run(ask("/models"))
    assert (full.status_code, full.json()["statusCode"], full.headers["retry-after"]) == (503, 503, "1")
    assert full.headers["x-request-id"]


def test_an_engine_whose_application_has_ended_is_stopped(tiny_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{broken")
    config = ServerConfig(keys_file=tmp_path / "keys.json")
    source = EngineSource(device="cpu", voices=tmp_path, config=EngineConfig(slots=2, kv_bytes=1 << 20))

    async def load() -> list[PooledModel]:
        pool = ModelPool(config, source, 1 << 40)
        with pytest.raises(ShoalError, match=r"keys\.json"):
            await pool.load("first", str(tiny_directory))
        return pool.models

    before = set(multiprocessing.active_children())
    assert asyncio.run(load()) == []
    left = set(multiprocessing.active_children()) - before
    for engine in left:
        engine.kill()  # this process could not end before it
    assert not left


def test_a_cancelled_load_leaves_no_engine(tiny_directory: Path, tmp_path: Path) -> None:
    source = EngineSource(device="cpu", voices=tmp_path, config=EngineConfig(slots=2, kv_bytes=1 << 20))
    before = set(multiprocessing.active_children())

    def left() -> set[BaseProcess]:
        return {each for each in multiprocessing.active_children() if each not in before}

    async def cancel() -> None:
        loading = asyncio.create_task(ModelPool(ServerConfig(), source, 1 << 40).load("first", str(tiny_directory)))
        async with asyncio.timeout(240):
            while not left():
                await asyncio.sleep(0.01)
        loading.cancel()
        with suppress(asyncio.CancelledError):
            await loading

    asyncio.run(cancel())
    deadline = time.monotonic() + 240
    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    remaining = left()
    for engine in remaining:
        engine.kill()
    assert not remaining


def test_the_variables_of_sagemaker_are_understood() -> None:
    settings = container_settings({"SAGEMAKER_BIND_TO_PORT": "9001", "SHOAL_SLOTS": "3"}).settings
    assert (settings.host, settings.port, settings.insecure, settings.slots) == ("0.0.0.0", 9001, True, 3)
    assert settings.model == "/opt/ml/model"
    assert container_settings({"SHOAL_MODEL": "nano"}).settings.model == "nano"
    assert is_multi_model({"SAGEMAKER_MULTI_MODEL": "true"})
    assert not is_multi_model({"SAGEMAKER_MULTI_MODEL": "false"})


def test_the_memory_limit_of_a_container_is_read(tmp_path: Path) -> None:
    (tmp_path / "max").write_text("1048576\n")
    (tmp_path / "none").write_text("max\n")
    machine = usable_bytes(())
    assert usable_bytes((tmp_path / "max",)) == 1 << 20
    assert usable_bytes((tmp_path / "none", tmp_path / "missing")) == machine > 1 << 20
