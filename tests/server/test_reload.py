"""Reloading the model while requests are in flight, and aborting a load at shutdown."""

import asyncio
import shutil
import signal
import threading
from pathlib import Path

import httpx
import pytest

from shoal.api.engine_client import EngineHandle, EngineLifecycle
from shoal.checkpoint.random import random_checkpoint
from shoal.checkpoint.save import save_random
from shoal.errors import EngineStopped
from tests.server.conftest import Start, pause_engine
from tests.server.routes.test_live import live, send, sounds
from tests.server.routes.test_live import receive_all as live_events
from tests.waiting import wait_until

SAY = {"text": "Hello there.", "max_new_tokens": 12, "seed": 5}
LONG = {"text": "Hello there.", "max_new_tokens": 1200, "seed": 10, "temperature": 1.5, "top_p": 1.0, "streaming": True}


def wait_for(log: Path, words: str) -> None:
    wait_until(lambda: words in log.read_text(), log.read_text)


def test_sigusr2_reloads_the_model_without_dropping_requests(tmp_path: Path, start_server: Start) -> None:
    model = tmp_path / "model"
    save_random(model, random_checkpoint("tiny", seed=0))
    server = start_server(model=model, guard=False)
    http = server.client()
    before = http.post("/v1/tts", json=SAY).content
    whole = http.post("/v1/tts", json=LONG).content
    with live(server) as session, http.stream("POST", "/v1/tts", json=LONG) as answer:
        send(session, event="start", request={"text": "", "format": "pcm", "max_new_tokens": 12, "seed": 5})
        pieces = answer.iter_raw()
        received = next(pieces)
        shutil.rmtree(model)
        save_random(model, random_checkpoint("tiny", seed=1))
        server.process.send_signal(signal.SIGUSR2)
        wait_for(server.log, "model reloaded: new requests use it")
        after = http.post("/v1/tts", json=SAY).content
        received += b"".join(pieces)
        # A live session continues with the reloaded model.
        send(session, event="text", text="Hello there.")
        send(session, event="stop")
        events = live_events(session)
    assert events[-1]["reason"] == "stop"
    assert sounds(events) > 0
    assert len(received) == len(whole)
    assert len(after) == len(before)
    assert after != before
    # A model that does not load changes nothing.
    (model / "config.json").write_text("{")
    server.process.send_signal(signal.SIGUSR2)
    wait_for(server.log, "keeping the previous one")
    assert http.post("/v1/tts", json=SAY).content == after
    assert http.get("/ready").json()["state"] == "ready"


def test_a_shutdown_during_loading_does_not_wait_for_the_model() -> None:
    given_up = threading.Event()

    def load() -> EngineHandle:
        assert given_up.wait(240)
        raise EngineStopped("the engine was closed")

    async def life() -> EngineLifecycle:
        host = EngineLifecycle(load, abort=given_up.set)
        host.start(lambda: pytest.fail("that is no failure"))
        await asyncio.sleep(0.05)
        await host.close(30.0)
        return host

    host = asyncio.run(life())
    assert (host.state, host.failure) == ("stopping", None)


def test_the_process_exits_while_the_model_is_loading(start_server: Start) -> None:
    server = start_server(model="nano", wait=False)
    pause_engine(server)  # so that the model is still loading when the signal arrives
    wait_for(server.log, "listening")
    assert httpx.get(f"{server.url}/ready", trust_env=False, verify=False).json()["state"] == "starting"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(240) == 0, server.log.read_text()
