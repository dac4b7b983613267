"""The packed repository on the real Triton, asked by its own client."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from shoal.deploy.package import model_files, package_triton
from tests.deploy import triton_server
from tests.deploy.conftest import ROOT, SAY
from tests.server.conftest import free_port, samples_of
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ask(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Several bodies at once; the answer to each: pieces, media type, error."""
    python = triton_server.environment()
    place = tmp_path_factory.mktemp("triton")
    package_triton(model_files(str(tiny_directory)), place / "models", lambda reported: None)
    with (place / "models" / "shoal" / "config.pbtxt").open("a") as config:
        # One of Triton's own among our settings.
        config.write('parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "yes" } }\n')
    grpc, http = free_port(), free_port()
    env = triton_server.surroundings() | {"SHOAL_GUARD": "false", "XDG_DATA_HOME": str(place), "SHOAL_SLOTS": "4"}
    with (place / "log").open("wb") as log:
        server = subprocess.Popen(
            triton_server.command(place / "models", grpc, http), stdout=log, stderr=log, env=env, cwd=place
        )
    try:
        wait_until_ready(server, f"http://127.0.0.1:{http}/v2/models/shoal/ready", place / "log")

        def run(*bodies: object) -> list[dict[str, Any]]:
            texts = [body if isinstance(body, str) else json.dumps(body) for body in bodies]
            client = [str(python), str(ROOT / "tests/deploy/triton_client.py"), f"127.0.0.1:{grpc}", *texts]
            ran = subprocess.run(client, capture_output=True, text=True, timeout=240)
            assert ran.returncode == 0, ran.stderr + (place / "log").read_text()
            answers: list[dict[str, Any]] = json.loads(ran.stdout)
            return answers

        yield run
    finally:
        server.terminate()
        assert server.wait(240) == 0, (place / "log").read_text()


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    def ready() -> bool:
        assert server.poll() is None, log.read_text()
        with suppress(httpx.TransportError):
            return httpx.get(url, trust_env=False, verify=False).status_code == 200
        return False

    wait_until(ready, log.read_text, interval=0.2)


def test_requests_are_spoken_together_and_streamed_in_pieces(ask: Ask) -> None:
    answers = ask(*({**SAY, "seed": seed, "streaming": True} for seed in range(4)))
    for answer in answers:
        assert answer["media_type"] == "audio/wav"
        assert len(answer["pieces"]) > 1
        assert len(samples_of(bytes.fromhex("".join(answer["pieces"])))) > 1000


def test_a_whole_file_is_one_piece_and_a_seed_sounds_the_same_alone_and_in_company(ask: Ask) -> None:
    (alone,) = ask(SAY)
    company = ask(*({**SAY, "seed": seed} for seed in (3, 4)))
    assert len(alone["pieces"]) == 1
    first, same, other = (samples_of(bytes.fromhex(each["pieces"][0])) for each in (alone, *company))
    assert np.abs(first - same).max() <= 2  # a batch rounds differently
    assert len(first) != len(other) or np.abs(first - other).max() > 100


@pytest.mark.parametrize(
    ("body", "reported"),
    [({"text": ""}, "text"), ({"text": "a", "colour": 1}, "colour"), ("no JSON", "not JSON"), ({}, "text")],
)
def test_what_cannot_be_spoken_is_reported(ask: Ask, body: object, reported: str) -> None:
    assert reported in ask(body)[0]["error"]


def test_a_request_of_openai_is_understood(ask: Ask) -> None:
    body = {"model": "tts-1", "input": "Hello.", "voice": "alloy", "response_format": "flac", "max_new_tokens": 20}
    assert ask(body)[0]["media_type"] == "audio/flac"
