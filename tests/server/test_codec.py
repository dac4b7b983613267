import httpx
import numpy as np
import ormsgpack

PACKED = {"content-type": "application/msgpack"}


def post(http: httpx.Client, path: str, content: object) -> httpx.Response:
    return http.post(path, content=ormsgpack.packb(content), headers=PACKED)


def test_codes_go_there_and_back(http: httpx.Client, recording: bytes) -> None:
    encoded = post(http, "/v1/vqgan/encode", {"audios": [recording, recording]})
    tokens = ormsgpack.unpackb(encoded.content)["tokens"]
    assert len(tokens) == 2
    assert tokens[0] == tokens[1]
    assert np.asarray(tokens[0]).shape == (10, 50)
    decoded = post(http, "/v1/vqgan/decode", {"tokens": tokens})
    samples = np.frombuffer(ormsgpack.unpackb(decoded.content)["audios"][0], "<f2")
    assert samples.shape == (2 * 16_000,)
    assert np.isfinite(samples).all()


def test_what_is_no_matrix_of_codes_is_refused(http: httpx.Client) -> None:
    assert post(http, "/v1/vqgan/decode", {"tokens": [[[1, 2], [3]]]}).status_code == 422
    assert post(http, "/v1/vqgan/decode", {"tokens": [[[1, 2]]]}).status_code == 400
    assert post(http, "/v1/vqgan/decode", {"tokens": [[[10**6]] * 10]}).status_code == 400
    assert post(http, "/v1/vqgan/encode", {"audios": [b"noise"]}).status_code == 400


def test_no_more_codes_are_decoded_than_the_longest_recording_has(http: httpx.Client) -> None:
    refused = post(
        http, "/v1/vqgan/decode", {"tokens": [[[1] * 2_251] * 10]}
    )  # 90 s at 25 frames a second, and one more
    assert refused.status_code == 422
    assert "at most 2,250 frames here (the setting reference_seconds): send longer ones in parts" in refused.text
