"""The packed repository on the real Triton, asked by its own client, and the archive for SageMaker's Triton."""

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from shoal.deploy.package import ARCHIVE, PackageFile, model_files, package_sagemaker_triton, package_triton
from tests.deploy import triton_server
from tests.deploy.conftest import ROOT, SAY
from tests.server.conftest import free_port, samples_of
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

Ask = Callable[..., list[dict[str, Any]]]


@dataclass(frozen=True)
class Triton:
    python: Path  # of the environment with Triton's client
    grpc: int
    sagemaker: int  # port of the interface that SageMaker calls
    log: Path


@pytest.fixture(scope="module")
def triton(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """Both packages on one server: `shoal`, decoupled, and `whole`, the archive for SageMaker's Triton container."""
    if sys.version_info[:2] > triton_server.LATEST_STUB:
        pytest.skip(f"{triton_server.PINNED[0]} has no backend for Python {triton_server.VERSION}")
    python = triton_server.environment()
    place = tmp_path_factory.mktemp("triton")
    parts = model_files(str(tiny_directory))
    package_triton(parts, place / "models", lambda reported: None)
    unpack_for_sagemaker(parts, place)
    with (place / "models" / "shoal" / "config.pbtxt").open("a") as config:
        # One of Triton's own among our settings.
        config.write('parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "yes" } }\n')
    found = Triton(python, free_port(), free_port(), place / "log")
    http = free_port()
    env = triton_server.surroundings() | {"SHOAL_GUARD": "false", "XDG_DATA_HOME": str(place), "SHOAL_SLOTS": "4"}
    env["SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"] = "whole"
    flags = ["--allow-sagemaker=true", f"--sagemaker-port={found.sagemaker}"]
    command = [*triton_server.command(place / "models", found.grpc, http), *flags]
    with found.log.open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=place)
    try:
        wait_until_ready(server, f"http://127.0.0.1:{http}/v2/health/ready", found.log)
        yield found
    finally:
        server.terminate()
        assert server.wait(240) == 0, found.log.read_text()


def unpack_for_sagemaker(parts: list[PackageFile], place: Path) -> None:
    """Unpack the archive as SageMaker does; the container names the model after the archive."""
    package_sagemaker_triton(parts, place / "packed", lambda reported: None)
    with tarfile.open(place / "packed" / ARCHIVE) as archive:
        archive.extractall(place / "unpacked", filter="data")
    (place / "unpacked" / "shoal").rename(place / "models" / "whole")


@pytest.fixture
def ask(triton: Triton) -> Ask:
    """Return a function that sends several bodies at once; the answer to each: pieces, media type, error."""

    def run(*bodies: object) -> list[dict[str, Any]]:
        texts = [body if isinstance(body, str) else json.dumps(body) for body in bodies]
        client = [str(triton.python), str(ROOT / "tests/deploy/triton_client.py"), f"127.0.0.1:{triton.grpc}", *texts]
        ran = subprocess.run(client, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, ran.stderr + triton.log.read_text()
        answers: list[dict[str, Any]] = json.loads(ran.stdout)
        return answers

    return run


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


def test_a_whole_file_is_one_piece_and_a_seed_sounds_the_same_alone_and_in_a_batch(ask: Ask) -> None:
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


def invoke(triton: Triton, body: object) -> tuple[int, dict[str, Any]]:
    """Send a request as SageMaker does; return status and content."""
    tensor = {"name": "request", "shape": [1], "datatype": "BYTES", "data": [json.dumps(body)]}
    url = f"http://127.0.0.1:{triton.sagemaker}/invocations"
    answer = httpx.post(url, json={"inputs": [tensor]}, timeout=240, trust_env=False, verify=False)
    return answer.status_code, answer.json()


def test_sagemakers_interface_gets_the_whole_file_in_one_response(triton: Triton, ask: Ask) -> None:
    status, content = invoke(triton, {**SAY, "streaming": False})
    outputs = {output["name"]: output["data"] for output in content["outputs"]}
    assert (status, outputs["media_type"]) == (200, ["audio/wav"])
    (same,) = ask({**SAY, "streaming": False})
    assert np.abs(samples_of(bytes(outputs["audio"])) - samples_of(bytes.fromhex(same["pieces"][0]))).max() <= 2


def test_sagemakers_interface_reports_what_cannot_be_spoken(triton: Triton) -> None:
    status, content = invoke(triton, {"text": "a", "colour": 1})
    assert status >= 400
    assert "colour" in content["error"]
