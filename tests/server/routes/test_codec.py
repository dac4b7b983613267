"""Recordings to codes and back: by a real server, and by one whose engine takes its time."""

import concurrent.futures
from pathlib import Path

import httpx
import numpy as np
import ormsgpack
import pytest

from shoal.api.config import Limits
from tests.server.standin import Standin, counted, listening, state_with
from tests.waiting import wait_until

PACKED = {"content-type": "application/msgpack"}


def post(http: httpx.Client, path: str, content: object) -> httpx.Response:
    return http.post(path, content=ormsgpack.packb(content), headers=PACKED)


def test_codes_are_decoded_and_encoded_again(http: httpx.Client, recording: bytes) -> None:
    encoded = post(http, "/v1/vqgan/encode", {"audios": [recording, recording]})
    tokens = ormsgpack.unpackb(encoded.content)["tokens"]
    assert len(tokens) == 2
    assert tokens[0] == tokens[1]
    assert np.asarray(tokens[0]).shape == (10, 50)
    decoded = post(http, "/v1/vqgan/decode", {"tokens": tokens})
    samples = np.frombuffer(ormsgpack.unpackb(decoded.content)["audios"][0], "<f2")
    assert samples.shape == (2 * 16_000,)
    assert np.isfinite(samples).all()


def test_invalid_matrices_of_codes_are_refused(http: httpx.Client) -> None:
    assert post(http, "/v1/vqgan/decode", {"tokens": [[[1, 2], [3]]]}).status_code == 422
    assert post(http, "/v1/vqgan/decode", {"tokens": [[[1, 2]]]}).status_code == 400
    assert post(http, "/v1/vqgan/decode", {"tokens": [[[10**6]] * 10]}).status_code == 400
    assert post(http, "/v1/vqgan/encode", {"audios": [b"noise"]}).status_code == 400


def test_no_more_codes_are_decoded_than_the_longest_recording_has(http: httpx.Client) -> None:
    refused = post(
        http, "/v1/vqgan/decode", {"tokens": [[[1] * 2_251] * 10]}
    )  # 90 s at 25 frames a second, and one more
    assert refused.status_code == 422
    assert "at most 2,250 frames (setting reference_seconds): send longer ones in parts" in refused.text


def test_a_failed_request_is_not_counted_as_completed(http: httpx.Client) -> None:
    def count(outcome: str) -> float:
        name = f'shoal_requests_total{{api="codec",outcome="{outcome}"}} '
        return sum(float(line.split()[-1]) for line in http.get("/metrics").text.splitlines() if line.startswith(name))

    spoken, failed = count("completed"), count("audio_error")
    assert post(http, "/v1/vqgan/encode", {"audios": [b"noise"]}).status_code == 400
    assert (count("completed"), count("audio_error")) == (spoken, failed + 1)


def test_a_disconnect_cancels_running_and_waiting_encodings(tmp_path: Path) -> None:
    standin = Standin()
    state = state_with(standin, Limits(), tmp_path)
    with (
        listening(state) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False) as http,
    ):
        with pytest.raises(httpx.ReadTimeout):
            http.post(
                "/v1/vqgan/encode",
                content=ormsgpack.packb({"audios": [b"a"] * 16}),
                headers=PACKED,
                timeout=httpx.Timeout(240, read=0.5),
            )
        wait_until(lambda: standin.left == 1)
        assert (standin.encoding, state.queue.in_flight) == (1, 0)
        assert counted(state, "codec", "disconnected") == 1


def test_encoding_has_the_time_of_a_request(tmp_path: Path) -> None:
    standin = Standin()
    state = state_with(standin, Limits(request_seconds=0.2), tmp_path)
    with (
        listening(state) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False) as http,
    ):
        late = post(http, "/v1/vqgan/encode", {"audios": [b"a"] * 16})
    assert (late.status_code, late.json()["message"]) == (504, "the request took longer than 0.2 seconds")
    assert (standin.encoding, standin.left) == (1, 1)
    assert counted(state, "codec", "deadline_exceeded") == 1


def test_bodies_are_read_while_many_wait_for_the_codec(tmp_path: Path) -> None:
    """More than the threads that read them."""
    standin = Standin()
    state = state_with(standin, Limits(), tmp_path)
    with (
        listening(state) as port,
        concurrent.futures.ThreadPoolExecutor(40) as pool,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False, timeout=240) as http,
    ):
        waiting = [pool.submit(post, http, "/v1/vqgan/encode", {"audios": [b"a"]}) for _ in range(40)]
        wait_until(lambda: standin.encoding == 40)
        assert http.post("/v1/tts", json={"text": "Hello.", "colour": "blue"}).status_code == 422
        standin.go_on.set()
        assert {each.result().status_code for each in waiting} == {200}
