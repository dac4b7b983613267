"""`POST /v1/tts` and `/v1/health`: the Fish API, compatible with fish-speech's server and Fish Audio's clients."""

import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from shoal.api.bodies.parsing import ALL
from shoal.api.bodies.schemas import SpeechBody, form_fields
from shoal.api.requests import fish_job, ignored_model
from shoal.api.speech_stream import SpeechStream
from shoal.api.word_events import FishAlignment
from shoal.server.middleware.request_id import request_id
from shoal.server.openapi import audio_response, error_responses, request_body
from shoal.server.request_body import read_model
from shoal.server.state import Caller, DirectRoute, State, bearer, resolve_caller
from shoal.server.streaming_response import Transform, respond

EVENT_STREAM = "text/event-stream"

router = APIRouter(tags=["Fish"], dependencies=[Depends(bearer)])
speech_router = APIRouter(tags=["Fish"], dependencies=[Depends(bearer)], route_class=DirectRoute)

EXAMPLES = {
    "plain": {"value": {"text": "Hello there.", "format": "mp3"}},
    "streamed": {"value": {"text": "Hello there.", "format": "opus", "streaming": True, "seed": 7}},
    "stored voice": {"value": {"text": "Hello there.", "reference_id": "narrator", "prosody": {"speed": 1.2}}},
}


@speech_router.post(
    "/v1/tts",
    summary="Generate speech from text",
    response_class=Response,
    responses=audio_response() | error_responses(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504),
    openapi_extra=request_body(SpeechBody, ALL, EXAMPLES),
)
async def speak(http: Request) -> Response:
    state, key = await resolve_caller(http)
    engine, limits = state.lifecycle.require_engine(), state.config.limits
    body = await read_model(http, SpeechBody, limits, state.body_budget, from_form=form_fields)
    ignored = ignored_model(http.headers.get("model"), state.config)
    return await respond(http, state, fish_job(body, engine, limits, key, request_id(http), ignored=ignored))


@router.post(
    "/v1/tts/stream/with-timestamp",
    summary="Generate speech as events with word times",
    response_class=Response,
    responses=audio_response(EVENT_STREAM)
    | error_responses(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504),
    openapi_extra=request_body(SpeechBody, ALL, EXAMPLES),
)
async def stream_with_timestamps(http: Request, state: State, key: Caller) -> Response:
    engine, limits = state.lifecycle.require_engine(), state.config.limits
    body = await read_model(http, SpeechBody, limits, state.body_budget, from_form=form_fields)
    ignored = ignored_model(http.headers.get("model"), state.config)
    body = body.model_copy(update={"streaming": True})
    job = fish_job(body, engine, limits, key, request_id(http), ignored=ignored)
    job = replace(job, request=replace(job.request, timestamps=True))
    return await respond(http, state, job, media_type=EVENT_STREAM, transform=_timed_events)


def _timed_events(stream: SpeechStream) -> Transform:
    """Wrap audio in server-sent events, each with the words that have ended in it."""
    alignment = FishAlignment()

    def event(audio: bytes) -> bytes:
        content = {"audio_base64": base64.b64encode(audio).decode(), **alignment.fields(stream.take_words())}
        return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            yield event(piece)
        yield event(b"")  # words that were found after the last piece of audio

    return events


@router.get("/v1/health", summary="Check that the server is up", responses=error_responses(401))
async def health(key: Caller) -> JSONResponse:
    return JSONResponse({"status": "ok"})


@router.post("/v1/health", summary="Check that the server is up", responses=error_responses(401, 429))
async def health_by_post(key: Caller) -> JSONResponse:
    return JSONResponse({"status": "ok"})
