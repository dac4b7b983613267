"""Speech of `shoal say` from a server that this user already runs: no model has to be loaded."""

import base64
import http.client
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.api.local_server import LocalServer, connect
from shoal.cli.say.prosody import ProsodyOptions
from shoal.errors import EngineStopped

if TYPE_CHECKING:
    from shoal.speech import AudioChunk, SpeechRequest

CONNECT_SECONDS = 2.0
READY_SECONDS = 10.0  # for an answer of /ready: a healthy server answers in milliseconds, also on a busy machine
# Time limit of each read. The first audio may have to wait for the model to load and for queued requests.
READ_SECONDS = 600.0
READ_BYTES = 1 << 16
# Fields of Sampling that `POST /v1/tts` has, by their names there.
SAMPLING_FIELDS = {"max_frames": "max_new_tokens"}
NOT_IN_THE_API = ("repetition",)
# About 100 s of speech. A server fails requests at their deadline (`request_seconds`, 60 by default), mid-audio.
MAX_CHARACTERS = 1_500


class ServerRefused(Exception):
    """The server cannot take this request, so the model has to be loaded in this process. The message says why."""


@dataclass
class ServerSpeech:
    """A response of the server: 16-bit samples as they are generated."""

    server: LocalServer
    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    sample_rate: int

    def chunks(self) -> Iterator["AudioChunk"]:
        """Yield the audio. Raises EngineStopped if the connection breaks before the end."""
        import numpy as np

        from shoal.audio.pcm import to_float
        from shoal.speech import AudioChunk, FinishReason

        rest = b""
        while data := self._read():
            data = rest + data
            whole = len(data) - len(data) % 2
            rest = data[whole:]
            yield AudioChunk(to_float(np.frombuffer(data[:whole], "<i2")), self.sample_rate)
        yield AudioChunk(np.zeros(0, np.float32), self.sample_rate, FinishReason.STOP)

    def close(self) -> None:
        """Close the connection, which cancels a request that has not ended."""
        self.response.close()
        self.connection.close()

    def _read(self) -> bytes:
        try:
            return self.response.read1(READ_BYTES)
        except (OSError, http.client.HTTPException) as problem:
            raise EngineStopped(
                f"the server with process id {self.server.pid} broke off; its log has the cause. Send the text again, "
                "or use --no-server"
            ) from problem


class UnixConnection(http.client.HTTPConnection):
    """HTTP over the Unix socket of a server."""

    def __init__(self, server: LocalServer, read_seconds: float) -> None:
        super().__init__("localhost")
        self._server, self._read_seconds = server, read_seconds

    def connect(self) -> None:
        self.sock: socket.socket = connect(self._server, CONNECT_SECONDS)
        self.sock.settimeout(self._read_seconds)


def check_ready(server: LocalServer) -> None:
    """Raise ServerRefused if a server does not accept requests now, ConnectionError if it has ended."""
    connection = UnixConnection(server, READY_SECONDS)
    try:
        connection.request("GET", "/ready")
        state = json.loads(connection.getresponse().read(READ_BYTES))["state"]
    except (TimeoutError, http.client.HTTPException, ValueError, TypeError, KeyError) as problem:
        raise ServerRefused("it does not answer") from problem
    finally:
        connection.close()
    if state != "ready":
        raise ServerRefused(f"it is {state}")


def speak_on_server(
    server: LocalServer, request: "SpeechRequest", sampling: dict[str, Any], prosody: ProsodyOptions
) -> ServerSpeech:
    """Send a request and return when the first audio is ready. Raises ServerRefused."""
    body = speech_body(request, sampling) | {"prosody": {"speed": prosody.speed, "volume": prosody.volume}}
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("SHOAL_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    connection = UnixConnection(server, READ_SECONDS)
    try:
        connection.request("POST", "/v1/tts", json.dumps(body).encode(), headers)
        response = connection.getresponse()
    except (OSError, http.client.HTTPException) as problem:
        connection.close()
        raise ServerRefused(f"it does not answer ({problem})") from problem
    if response.status != http.client.OK:
        refusal = _refusal(response)
        connection.close()
        raise ServerRefused(refusal)
    return ServerSpeech(server, connection, response, int(response.headers["X-Sample-Rate"]))


def speech_body(request: "SpeechRequest", sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the body of `POST /v1/tts`. Raises ServerRefused for options that it does not have."""
    missing = [name for name in NOT_IN_THE_API if name in sampling]
    if missing:
        raise ServerRefused(f"its API has no {', '.join(missing)}")
    if len(request.text) > MAX_CHARACTERS:
        raise ServerRefused(f"its requests have a time limit, and the text has more than {MAX_CHARACTERS:,} characters")
    recordings = [
        {"audio": base64.b64encode(each.audio).decode(), "text": each.transcript} for each in request.recordings
    ]
    return {
        "text": request.text,
        "format": "pcm",
        "streaming": True,
        "reference_id": request.voice,
        "references": recordings,
        "normalize": request.language or request.normalize,
        "ssml": request.ssml,
        **{SAMPLING_FIELDS.get(name, name): value for name, value in sampling.items()},
    }


def _refusal(response: http.client.HTTPResponse) -> str:
    if response.status == http.client.UNAUTHORIZED:
        given = os.environ.get("SHOAL_API_KEY")
        return "it rejects the key of SHOAL_API_KEY" if given else "it requires an API key: set SHOAL_API_KEY"
    return f"it answers with status {response.status}"
