"""The worker behind the local API of the runpod package, and the script that sets a pod up."""

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from packaging.requirements import Requirement

from shoal import __version__
from tests.deploy.conftest import ROOT, SAY
from tests.native.conftest import place_library
from tests.server.conftest import Serving, free_port, samples_of, surroundings

SETUP = ROOT / "deploy" / "runpod" / "setup.sh"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home, port = tmp_path_factory.mktemp("runpod"), free_port()
    local = ["--rp_serve_api", "--rp_api_host", "127.0.0.1", "--rp_api_port", str(port)]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal.deploy.runpod_worker", *local],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=surroundings(home) | {"SHOAL_MODEL": "random:tiny", "SHOAL_SLOTS": "4"},
        )
    serving = Serving(process, f"http://127.0.0.1:{port}", home / "log", home)
    serving.wait_until_ready("/")
    yield serving.client()
    serving.end()


def audio_of(pieces: list[dict[str, Any]]) -> bytes:
    return b"".join(base64.b64decode(piece["audio"]) for piece in pieces)


def test_a_job_returns_all_its_pieces(worker: httpx.Client) -> None:
    answer = worker.post("/runsync", json={"input": {**SAY, "streaming": True}}).json()
    assert answer["status"] == "COMPLETED", answer
    pieces = answer["output"]
    assert len(pieces) > 1
    assert {(piece["media_type"], piece["sample_rate"]) for piece in pieces} == {
        ("audio/wav", pieces[0]["sample_rate"])
    }
    assert len(samples_of(audio_of(pieces))) > 1000


def test_a_job_can_be_streamed(worker: httpx.Client) -> None:
    job = worker.post("/run", json={"input": {**SAY, "streaming": True, "format": "pcm"}}).json()["id"]
    streamed = worker.post(f"/stream/{job}").json()
    assert streamed["status"] == "COMPLETED", streamed
    whole = worker.post("/runsync", json={"input": {**SAY, "format": "pcm"}}).json()["output"]
    assert len(whole) == 1
    pieces = [each["output"] for each in streamed["stream"]]
    assert len(pieces) > 1
    decoded, same = (np.frombuffer(audio_of(each), "<i2").astype(int) for each in (pieces, whole))
    assert np.abs(decoded - same).max() <= 2  # pieces round differently


@pytest.mark.parametrize(
    ("given", "reported"), [({"text": ""}, "text"), ({"text": "a", "reference_id": "nobody"}, "nobody"), ({}, "text")]
)
def test_what_cannot_be_spoken_is_an_error_of_the_job(
    worker: httpx.Client, given: dict[str, Any], reported: str
) -> None:
    (last,) = worker.post("/runsync", json={"input": given}).json()["output"]
    assert reported in last["error"]


@pytest.mark.parametrize(
    "address", ["git+https://example.com/shoal.git", "https://example.com/shoal-1-py3-none-any.whl"]
)
def test_an_address_is_installed_with_what_a_server_needs(address: str, tmp_path: Path) -> None:
    (installed,) = calls_of_setup(tmp_path, "pip", SHOAL_PACKAGE=address)
    requirement = Requirement(installed.removeprefix("install --quiet "))
    assert (requirement.name, requirement.extras, requirement.url) == ("shoal-tts", {"server"}, address)


@pytest.mark.parametrize(
    ("package", "wanted"),
    [
        ("shoal-tts", "shoal-tts[server]"),
        ("shoal-tts==3.1", "shoal-tts[server]==3.1"),
        ("/wheels/shoal_tts-1-py3-none-any.whl", "/wheels/shoal_tts-1-py3-none-any.whl[server]"),
    ],
)
def test_a_name_or_a_wheel_is_installed_with_what_a_server_needs(package: str, wanted: str, tmp_path: Path) -> None:
    assert calls_of_setup(tmp_path, "pip", SHOAL_PACKAGE=package) == [f"install --quiet {wanted}"]


def test_without_a_package_the_version_of_the_script_is_installed(tmp_path: Path) -> None:
    assert calls_of_setup(tmp_path, "pip") == [f"install --quiet shoal-tts[server]=={__version__}"]


def test_a_wheel_beside_the_script_is_installed(tmp_path: Path) -> None:
    wheel = tmp_path / "shoal_tts-9-py3-none-any.whl"
    wheel.touch()
    script = shutil.copy(SETUP, tmp_path / "setup.sh")
    assert calls_of_setup(tmp_path, "pip", script=script) == [f"install --quiet {wheel}[server]"]


@pytest.mark.parametrize(
    ("model", "pulls"), [("nano", []), ("mine/model", []), ("/no/where", []), ("reef/tiny", ["pull reef/tiny"])]
)
def test_only_what_is_no_directory_is_fetched(model: str, pulls: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    called = calls_of_setup(tmp_path, "shoal", SHOAL_MODEL=model, SHOAL_API_KEYS="a-key")
    assert called == [*pulls, "serve"]


def calls_of_setup(place: Path, program: str, script: Path = SETUP, **variables: str) -> list[str]:
    """Run the first start with a Python that makes environments whose programs only note their arguments."""
    noted = f'#!/bin/sh\necho "$@" >> "{place}/${{0##*/}}.calls"\n'
    (place / "noted").write_text(noted)
    (place / "python3").write_text(
        f'#!/bin/sh\nmkdir -p "$4/bin"\ncp "{place}/noted" "$4/bin/pip"\ncp "{place}/noted" "$4/bin/shoal"\n'
    )
    for name in ("noted", "python3"):
        (place / name).chmod(0o755)
    env = {"PATH": f"{place}:{os.environ['PATH']}", "WORKSPACE": str(place / "volume"), **variables}
    subprocess.run(["sh", "-eu", str(script)], check=True, capture_output=True, cwd=place, env=env, timeout=240)
    return (place / f"{program}.calls").read_text().splitlines()


def test_a_pod_is_set_up_and_serves(tmp_path: Path) -> None:
    """A pod after its first start: packages are installed and the key exists."""
    place, port = tmp_path / "shoal", free_port()
    place.mkdir()
    place_library(ROOT)  # the pod's cache directory is empty: it would compile one after a change of the sources
    (place / "venv").symlink_to(Path(sys.executable).parents[1])
    env = surroundings(tmp_path) | {"WORKSPACE": str(tmp_path), "SHOAL_MODEL": "random:tiny", "SHOAL_PORT": str(port)}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(["sh", str(SETUP)], stdout=log, stderr=log, cwd=ROOT, env=env)
    serving = Serving(process, f"http://127.0.0.1:{port}", tmp_path / "log", place)
    try:
        serving.wait_until_ready()
        reported = next(line for line in serving.log.read_text().splitlines() if "the key of this pod: " in line)
        key = reported.rpartition(" ")[2]
        assert serving.client().post("/v1/tts", json=SAY).status_code == 401
        assert serving.client(Authorization=f"Bearer {key}").post("/v1/tts", json=SAY).status_code == 200
    finally:
        assert serving.end() == 0, serving.log.read_text()
