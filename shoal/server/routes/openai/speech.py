"""`POST /v1/audio/speech` and `GET /v1/models`: the OpenAI API."""

import base64
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from shoal.api.bodies.parsing import JSON, MSGPACK
from shoal.api.bodies.schemas import OpenAISpeech
from shoal.api.engine_client import EngineHandle
from shoal.api.keys import Key
from shoal.api.requests import check_model, model_names, openai_job
from shoal.api.speech_stream import SpeechStream
from shoal.api.state import ServerState
from shoal.api.word_events import word_list
from shoal.server.middleware.request_id import request_id
from shoal.server.openapi import audio_response, error_responses, request_body
from shoal.server.request_body import read_model
from shoal.server.routes.elevenlabs.voices import model_list
from shoal.server.state import Caller, DirectRoute, State, bearer, resolve_caller
from shoal.server.streaming_response import Transform, respond

EVENT_STREAM = "text/event-stream"

router = APIRouter(tags=["OpenAI"], dependencies=[Depends(bearer)])
speech_router = APIRouter(tags=["OpenAI"], dependencies=[Depends(bearer)], route_class=DirectRoute)

EXAMPLES = {
    "plain": {"value": {"model": "tts-1", "input": "Hello there.", "voice": "alloy"}},
    "events": {"value": {"model": "tts-1", "input": "Hello there.", "voice": "alloy", "stream_format": "sse"}},
}


@speech_router.post(
    "/v1/audio/speech",
    summary="Generate speech from text",
    response_class=Response,
    responses=audio_response(EVENT_STREAM)
    | error_responses(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504, openai=True),
    openapi_extra=request_body(OpenAISpeech, (JSON, MSGPACK), EXAMPLES),
)
async def speak(http: Request) -> Response:
    state, key = await resolve_caller(http)
    engine = state.lifecycle.require_engine()
    body = await read_model(http, OpenAISpeech, state.config.limits, state.body_budget)
    return await respond_openai(http, body, state, engine, key)


async def respond_openai(
    http: Request, body: OpenAISpeech, state: ServerState, engine: EngineHandle, key: Key
) -> Response:
    """Respond to an OpenAI body with audio or server-sent events. Also used by SageMaker's `/invocations`."""
    job = openai_job(body, engine, state.config, key, request_id(http))
    if body.stream_format == "audio":
        return await respond(http, state, job)
    events = _sse_events(body.input, engine.frame_rate)
    return await respond(http, state, job, media_type=EVENT_STREAM, transform=events)


def _sse_events(text: str, frame_rate: float) -> Callable[[SpeechStream], Transform]:
    """Wrap audio in server-sent events: base64 deltas, words if requested, at the end the usage in bytes and frames."""

    def bind(stream: SpeechStream) -> Transform:
        async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for piece in pieces:
                yield _event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
                if words := stream.take_words():
                    yield _event({"type": "speech.audio.words", "words": word_list(words)})
            if words := stream.take_words():
                yield _event({"type": "speech.audio.words", "words": word_list(words)})
            frames = round(stream.accounting.audio_seconds * frame_rate)
            size = len(text.encode())
            usage = {"input_tokens": size, "output_tokens": frames, "total_tokens": size + frames}
            yield _event({"type": "speech.audio.done", "usage": usage})

        return events

    return bind


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


@router.get("/v1/models", summary="List the model and its aliases", responses=error_responses(401, openai=True))
async def models(http: Request, state: State, key: Caller) -> JSONResponse:
    # OpenAI and ElevenLabs share this path; only ElevenLabs' clients send this header.
    if "xi-api-key" in http.headers:
        return model_list(state.config)
    return JSONResponse({"object": "list", "data": [_model(name) for name in model_names(state.config)]})


@router.get(
    "/v1/models/{name:path}", summary="Describe a model or an alias", responses=error_responses(401, 404, openai=True)
)
async def model(name: str, state: State, key: Caller) -> JSONResponse:
    check_model(name, state.config)
    return JSONResponse(_model(name))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "shoal"}
