"""A server whose engine process ends when it is idle, with real processes."""

import os
import signal
import threading
from pathlib import Path

import httpx

from tests.server.conftest import Start, engines_of, figure, pause_engine
from tests.waiting import TIMEOUT_SECONDS, wait_until

BODY = {"text": "Hello there.", "seed": 5, "max_new_tokens": 6}


def test_an_idle_server_sleeps_wakes_for_a_request_and_finishes_it_when_it_is_stopped(start_server: Start) -> None:
    # The limits are generous: under load the engine takes long to wake.
    serving = start_server(sleep_seconds=0.5, request_seconds=TIMEOUT_SECONDS, drain_seconds=TIMEOUT_SECONDS)
    http = serving.client()
    first = http.post("/v1/tts", json=BODY)
    wait_until(lambda: http.get("/ready").json()["engine"] == "asleep", serving.log.read_text)
    assert http.get("/ready").status_code == 200
    wait_until(lambda: not engines_of(serving), serving.log.read_text)
    assert (figure(http, "shoal_engine_asleep"), figure(http, "shoal_ready")) == (1, 1)
    assert not engines_of(serving)  # /metrics and /ready wake nothing

    answers: list[httpx.Response] = []
    late = serving.client()
    speaking = threading.Thread(target=lambda: answers.append(late.post("/v1/tts", json=BODY)))
    speaking.start()
    engine = pause_engine(serving)
    waking = http.get("/ready")
    assert (waking.status_code, waking.json()["state"], waking.json()["engine"]) == (200, "ready", "waking")
    serving.process.send_signal(signal.SIGTERM)
    wait_until(lambda: http.get("/ready").json()["state"] == "stopping", serving.log.read_text)
    os.kill(engine, signal.SIGCONT)
    speaking.join(TIMEOUT_SECONDS)
    assert (first.status_code, answers[0].status_code) == (200, 200), serving.log.read_text()
    assert answers[0].content == first.content
    assert serving.end() == 0
    assert not Path(f"/proc/{engine}").exists()
