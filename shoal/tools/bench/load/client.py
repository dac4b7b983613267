"""Client of one request to a speech server with the OpenAI or Fish API; records when audio arrives."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from shoal.errors import AudioError, InvalidRequest
from shoal.tools.bench.load.audio_meter import AudioMeter
from shoal.tools.bench.load.http import HttpClient, RequestFailed
from shoal.tools.bench.load.playback import BUFFERS, stalled_seconds

Api = Literal["openai", "fish"]

ROUTES: dict[Api, str] = {"openai": "/v1/audio/speech", "fish": "/v1/tts"}
# Sample rates of PCM without an x-sample-rate header. Fish servers stream WAV, whose header has the rate.
RATES: dict[Api, int] = {"openai": 24_000, "fish": 44_100}
SOUNDS = ("audio/pcm", "audio/wav", "audio/wave", "audio/x-wav", "audio/l16", "application/octet-stream", "")


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A server and the parameters of its requests."""

    url: str  # URL of the speech route
    api: Api
    model: str | None = None
    voice: str | None = None
    key: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return urlsplit(self.url).netloc

    def body(self, text: str, number: int) -> dict[str, Any]:
        """Return a request for streamed PCM or WAV, with fields that every server of the API supports."""
        if self.api == "fish":
            body: dict[str, Any] = {"text": text, "format": "wav", "streaming": True, "seed": number}
            return body | ({"reference_id": self.voice} if self.voice else {})
        return {
            "model": self.model or "tts-1",
            "input": text,
            "voice": self.voice or "alloy",
            "response_format": "pcm",
        }

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """One request as the load generator saw it. Times are in seconds from its due time."""

    number: int
    due: float  # seconds from the start of the stage
    late: float  # delay until it was sent by the load generator, included in the other times
    first_audio: float | None
    seconds: float
    audio_seconds: float
    stalled: tuple[float, ...]  # seconds of stalled playback with each of BUFFERS
    error: str | None = None

    @property
    def empty(self) -> bool:
        """Return whether the answer was complete but without audio: the model ended the speech at its first frame."""
        return self.error is None and self.first_audio is None

    @property
    def spoken(self) -> bool:
        """Return whether the answer was complete and had audio."""
        return self.error is None and self.first_audio is not None


def parse_target(url: str, api: str | None = None, **fields: str | None) -> LoadTarget:
    """Parse a URL with or without the route; without `api`, the route decides the API. Raises InvalidRequest."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidRequest(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8080")
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest("the URL must not contain a user name or password, since results store it: use --key")
    found = next((name for name, route in ROUTES.items() if parts.path.endswith(route)), None)
    if api is not None and api not in ROUTES:
        raise InvalidRequest(f"unknown API {api!r}: use {' or '.join(ROUTES)}")
    chosen = next((name for name in ROUTES if name == api), None) or found or "openai"
    if found not in (None, chosen):
        raise InvalidRequest(f"{url} is a route of the {found} API, but --api is {chosen}")
    base = url.rstrip("/").removesuffix("/v1")
    return LoadTarget(url if found else base + ROUTES[chosen], chosen, **fields)


async def send_request(
    http: HttpClient, target: LoadTarget, text: str, number: int, due: float, began: float
) -> LoadOutcome:
    """Send one request and record when audio arrives. `due` and `began` (start of the stage) are event loop times."""
    clock = asyncio.get_running_loop().time
    sent, arrivals, error = clock(), list[tuple[float, float]](), None
    try:
        async for seconds in _audio(http, target, text, number):
            if seconds:
                arrivals.append((clock() - due, seconds))
    except (RequestFailed, AudioError) as problem:
        error = str(problem)
    return LoadOutcome(
        number=number,
        due=due - began,
        late=sent - due,
        first_audio=arrivals[0][0] if arrivals else None,
        seconds=clock() - due,
        audio_seconds=sum(seconds for _, seconds in arrivals),
        stalled=tuple(stalled_seconds(arrivals, buffer) for buffer in BUFFERS),
        error=error,
    )


async def _audio(http: HttpClient, target: LoadTarget, text: str, number: int) -> AsyncIterator[float]:
    """Yield the seconds of audio in every piece that arrives."""
    body = json.dumps(target.body(text, number)).encode()
    async with http.post(target.url, body, target.headers) as answer:
        if not 200 <= answer.status < 300:
            raise RequestFailed(f"HTTP {answer.status}")
        kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in SOUNDS:
            raise AudioError(f"{kind} instead of pcm or wav")
        meter = AudioMeter(_rate(answer.headers.get("x-sample-rate"), target.api))
        async for piece in answer.pieces():
            yield meter.feed(piece)
        yield meter.end()


def _rate(said: str | None, api: Api) -> int:
    return int(said) if said and said.isdecimal() and int(said) else RATES[api]
