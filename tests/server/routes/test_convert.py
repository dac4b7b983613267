"""A wav file in another format: whole, in little memory, and beside speech."""

import io
import socket
import wave
from pathlib import Path

import httpx
import numpy as np
import pytest

from shoal.api.output import OutputOptions
from shoal.audio.encode import encode_file
from shoal.errors import AudioError
from shoal.server.routes.convert import conversion_steps
from tests.server.conftest import Serving
from tests.waiting import wait_until


def wav_of(samples: np.ndarray, rate: int, channels: int = 1) -> bytes:
    """8 or 16 bits, by the type of the samples."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(samples.dtype.itemsize)
        out.setframerate(rate)
        out.writeframes(samples.tobytes())
    return file.getvalue()


def float_wav(samples: np.ndarray, rate: int) -> bytes:
    head = bytearray(wav_of(np.zeros(0, np.int16), rate)[:44])
    head[20:22], head[28:32], head[32:36] = b"\3\0", (4 * rate).to_bytes(4, "little"), b"\4\0\x20\0"
    head[40:44] = (4 * samples.size).to_bytes(4, "little")
    return bytes(head) + samples.astype("<f4").tobytes()


def noise(seconds: float, rate: int) -> np.ndarray:
    return np.random.default_rng(1).uniform(-0.9, 0.9, int(seconds * rate)).astype(np.float32)


def converted(audio: bytes, format: str) -> bytes:
    return list(conversion_steps(audio, OutputOptions(format)))[-1]


@pytest.mark.parametrize("format", ["wav", "pcm", "flac", "mp3"])
def test_stepwise_conversion_equals_conversion_at_once(format: str) -> None:
    samples = noise(9.0, 16_000)
    assert converted(float_wav(samples, 16_000), format) == encode_file(samples, format, 16_000)


def test_step_size_does_not_depend_on_the_length() -> None:
    steps = list(conversion_steps(float_wav(noise(60.0, 16_000), 16_000), OutputOptions("pcm")))
    assert len(steps) > 2 * 60 * 16_000 / (1 << 16)
    assert set(steps[:-1]) == {b""}


def test_a_file_above_full_scale_is_attenuated_as_a_whole() -> None:
    samples = noise(5.0, 16_000)
    samples[-1] = 2.0
    assert converted(float_wav(samples, 16_000), "pcm") == encode_file(samples / 2, "pcm", 16_000)


def test_two_channels_are_averaged() -> None:
    pair = np.array([[8_000, 4_000], [-2_000, 0]] * 1_000, np.int16)
    decoded = np.frombuffer(converted(wav_of(pair, 16_000, channels=2), "pcm"), "<i2")
    assert decoded.tolist() == [6_000, -1_000] * 1_000


@pytest.mark.parametrize(
    "audio",
    [
        wav_of(np.zeros(0, np.int16), 16_000),
        wav_of(np.zeros(3 * 100, np.int16), 16_000, channels=3),
        wav_of(np.zeros(100, np.int16), 4_000),
        wav_of(np.zeros(8_000 * 3_601, np.uint8), 8_000),
        wav_of(np.zeros(160_000, np.int16), 16_000)[:100_000],
        float_wav(np.array([0.0, np.nan] * 8_000), 16_000),
        float_wav(np.array([0.0, np.inf] * 8_000), 16_000),
    ],
)
def test_audio_outside_the_limits_is_rejected(audio: bytes) -> None:
    with pytest.raises(AudioError):
        converted(audio, "wav")


def quiet_minutes(minutes: int) -> bytes:
    """Audio with as many samples per byte as possible."""
    return wav_of(np.random.default_rng(0).integers(100, 156, minutes * 60 * 8_000, dtype=np.uint8), 8_000)


def most_memory(server: Serving) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


def test_a_long_recording_takes_little_memory(server: Serving, http: httpx.Client) -> None:
    audio = quiet_minutes(10)
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # resets the peak RSS
    before = server.memory()
    answer = http.post("/v1/convert", data={"format": "opus"}, files={"audio": ("a.wav", audio)})
    assert answer.status_code == 200
    assert most_memory(server) - before < 120 << 20


def test_a_conversion_is_counted_and_ends_when_its_client_disconnects(server: Serving, http: httpx.Client) -> None:
    # Long enough to be observed in flight on any machine.
    request = httpx.Request("POST", server.url, data={"format": "opus"}, files={"audio": ("a.wav", quiet_minutes(58))})
    content, kind = request.read(), request.headers["content-type"]
    head = f"POST /v1/convert HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    left = 'shoal_requests_total{api="convert",outcome="disconnected"} 1.0'
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as line:
        line.sendall(head.encode() + content)
        wait_until(lambda: http.get("/ready").json()["in_flight"] == 1)
        assert left not in http.get("/metrics").text
    wait_until(lambda: left in http.get("/metrics").text)
    assert http.get("/ready").json()["in_flight"] == 0
