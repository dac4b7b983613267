"""`POST /v1/audio/speech` and `GET /v1/models`: OpenAI's API, as its clients send it."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field

from shoal.api.config import ServerConfig
from shoal.api.fields import Body, MaxFrames, RepetitionPenalty, SampleRate, Seed, Temperature, TopP, VoiceName
from shoal.api.output import Rendering
from shoal.api.requests import check_length, sampling_for
from shoal.api.speech_stream import Order, Performance
from shoal.errors import ModelNotFound
from shoal.server.keys import Key
from shoal.server.middleware.request_id import request_id
from shoal.server.openapi import answers, body_of, returns_audio
from shoal.server.parsing import JSON, MSGPACK, read_model
from shoal.server.routes.fish import headers_for
from shoal.server.state import AtDesk, Caller, Desk, bearer
from shoal.server.streaming_response import Dress, perform
from shoal.speech import SpeechRequest

# OpenAI's own voices. Where no stored voice has the name, the model speaks as it does by itself.
OPENAI_VOICES = frozenset(
    {"alloy", "ash", "ballad", "cedar", "coral", "default", "echo", "fable"}
    | {"marin", "nova", "onyx", "sage", "shimmer", "verse"}
)
PCM_RATE = 24_000  # what OpenAI's clients expect of bare samples
EVENT_STREAM = "text/event-stream"

router = APIRouter(tags=["OpenAI"], dependencies=[Depends(bearer)])


def _no_instructions(value: Any) -> Any:
    if value:
        raise ValueError("instructions are not supported: these models take their style from the voice and the text")
    return value


class VoiceById(Body):
    id: VoiceName


class OpenAISpeech(Body):
    model: Annotated[str, Field(min_length=1, max_length=255)]
    input: Annotated[str, Field(min_length=1)]
    voice: Annotated[VoiceName | VoiceById, Field(description="A stored voice, or one of OpenAI's names.")]
    instructions: Annotated[
        Literal[""] | None,
        BeforeValidator(_no_instructions),
        Field(description="Not supported: these models take their style from the voice and the text."),
    ] = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "mp3"
    speed: Annotated[float, Field(ge=0.25, le=4.0, description="At the same pitch.")] = 1.0
    stream_format: Literal["audio", "sse"] = "audio"
    sample_rate: Annotated[SampleRate | None, Field(description="Not OpenAI's. Without it pcm has 24000.")] = None
    seed: Annotated[Seed | None, Field(description="Not OpenAI's, like all below.")] = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: MaxFrames | None = None
    normalize: Annotated[bool, Field(description="As of /v1/tts.")] = True

    def rendering(self) -> Rendering:
        rate = self.sample_rate or (PCM_RATE if self.response_format == "pcm" else None)
        return Rendering(self.response_format, rate, speed=self.speed)


EXAMPLES = {
    "plain": {"value": {"model": "tts-1", "input": "Hello there.", "voice": "alloy"}},
    "events": {"value": {"model": "tts-1", "input": "Hello there.", "voice": "alloy", "stream_format": "sse"}},
}


@router.post(
    "/v1/audio/speech",
    summary="Speak a text",
    response_class=Response,
    responses=returns_audio(EVENT_STREAM)
    | answers(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504, openai=True),
    openapi_extra=body_of(OpenAISpeech, (JSON, MSGPACK), EXAMPLES),
)
async def speak(http: Request, desk: AtDesk, key: Caller) -> Response:
    desk.host.engine()
    return await spoken(http, await read_model(http, OpenAISpeech, desk.config.limits, desk.budget), desk, key)


async def spoken(http: Request, body: OpenAISpeech, desk: Desk, key: Key) -> Response:
    """The audio as it is, or as events, whatever route the body came by."""
    order = await openai_order(body, desk, key, request_id(http))
    headers = headers_for(order, desk)
    if body.stream_format == "audio":
        return await perform(http, desk, order, headers)
    dress = _events(body.input, desk.host.engine().frame_rate)
    return await perform(http, desk, order, headers, media_type=EVENT_STREAM, dress=dress)


async def openai_order(body: OpenAISpeech, desk: Desk, key: Key, id: str) -> Order:
    loaded, limits = desk.host.engine(), desk.config.limits
    check_model(body.model, desk.config)
    sampling = sampling_for(loaded, body)
    text = check_length(body.input, limits)
    voice = await _voice(body, desk)
    request = SpeechRequest(
        text, voice=voice, sampling=sampling, normalize=body.normalize, timeout=limits.request_seconds
    )
    return Order("openai", request, body.rendering(), key, id)


def check_model(model: str, config: ServerConfig) -> None:
    known = _models(config)
    if model not in known:
        raise ModelNotFound(f"there is no model {model[:64]!r} here; this server answers to {', '.join(known)}")


async def _voice(body: OpenAISpeech, desk: Desk) -> str | None:
    name = body.voice if isinstance(body.voice, str) else body.voice.id
    if name not in OPENAI_VOICES:
        return name
    stored = await asyncio.to_thread(desk.host.engine().voices.exists, name)
    return name if stored else None


def _events(text: str, frame_rate: float) -> Callable[[Performance], Dress]:
    """Server-sent events: base64 deltas, then the usage in bytes of text and frames of audio."""

    def dress(performance: Performance) -> Dress:
        async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for piece in pieces:
                yield _event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
            frames = round(performance.tally.seconds * frame_rate)
            read = len(text.encode())
            usage = {"input_tokens": read, "output_tokens": frames, "total_tokens": read + frames}
            yield _event({"type": "speech.audio.done", "usage": usage})

        return events

    return dress


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


@router.get("/v1/models", summary="List the model and its aliases", responses=answers(401, openai=True))
async def models(desk: AtDesk, key: Caller) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [_model(name) for name in _models(desk.config)]})


@router.get("/v1/models/{name:path}", summary="One of them", responses=answers(401, 404, openai=True))
async def model(name: str, desk: AtDesk, key: Caller) -> JSONResponse:
    check_model(name, desk.config)
    return JSONResponse(_model(name))


def _models(config: ServerConfig) -> tuple[str, ...]:
    return (config.model, *config.model_aliases)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "shoal"}
