"""A server with the bundled model, nano."""

import asyncio
import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shoal.cli.serving.serve import print_address
from tests.nano import SAMPLE_RATE, VOICES
from tests.server.conftest import Serving, start
from tests.server.crowd import Crowd, wait_until_settled
from tests.waiting import TIMEOUT_SECONDS

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
    asyncio.run(crowd.run(requests=6, clients=6))
    assert (crowd.received + crowd.disconnected, crowd.different) == (6, 0)
    wait_until_settled(nano)


def test_the_request_that_is_printed_at_start_works_with_an_older_curl(
    nano: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_address("127.0.0.1", int(nano.url.rsplit(":", 1)[1]), "nano")
    [command] = [line.strip() for line in capsys.readouterr().err.splitlines() if line.strip().startswith("curl")]
    assert "--json" not in command  # new in curl 7.82
    command = command.replace("curl", "curl --noproxy '*'", 1)
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, capture_output=True, timeout=TIMEOUT_SECONDS)
    assert (tmp_path / "hello.wav").read_bytes().startswith(b"RIFF")


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


def test_word_times_come_with_the_audio(http: httpx.Client) -> None:
    text = "Room 5 costs $20."
    body = {"model": "nano", "voice": "alloy", "input": text, "seed": 1, "response_format": "pcm"}
    timed = body | {"stream_format": "sse", "timestamps": True, "sample_rate": SAMPLE_RATE}
    events = [
        json.loads(line.removeprefix("data: "))
        for line in http.post("/v1/audio/speech", json=timed).iter_lines()
        if line
    ]
    words = [word for event in events if event["type"] == "speech.audio.words" for word in event["words"]]
    assert [word["text"] for word in words] == text.split()
    assert [text[word["first"] : word["last"]] for word in words] == text.split()
    audio = sum(len(base64.b64decode(event["audio"])) for event in events if event["type"] == "speech.audio.delta")
    assert words[-1]["end"] <= audio / 2 / SAMPLE_RATE
    whole = http.post(f"/v1/text-to-speech/{VOICES[0]}/with-timestamps", json={"text": text, "seed": 1}).json()
    assert "".join(whole["alignment"]["characters"]).split() == text.split()
