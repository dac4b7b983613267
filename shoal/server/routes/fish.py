"""`POST /v1/tts` and `/v1/health`: the Fish API, compatible with fish-speech's server and Fish Audio's clients."""

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from shoal.api.parsing import ALL
from shoal.api.requests import fish_job, ignored_model
from shoal.api.schemas import SpeechBody, form_fields
from shoal.server.middleware.request_id import request_id
from shoal.server.openapi import audio_response, error_responses, request_body
from shoal.server.request_body import read_model
from shoal.server.state import Caller, State, bearer
from shoal.server.streaming_response import respond

router = APIRouter(tags=["Fish"], dependencies=[Depends(bearer)])

EXAMPLES = {
    "plain": {"value": {"text": "Hello there.", "format": "mp3"}},
    "streamed": {"value": {"text": "Hello there.", "format": "opus", "streaming": True, "seed": 7}},
    "stored voice": {"value": {"text": "Hello there.", "reference_id": "narrator", "prosody": {"speed": 1.2}}},
}


@router.post(
    "/v1/tts",
    summary="Generate speech from text",
    response_class=Response,
    responses=audio_response() | error_responses(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504),
    openapi_extra=request_body(SpeechBody, ALL, EXAMPLES),
)
async def speak(http: Request, state: State, key: Caller) -> Response:
    engine, limits = state.lifecycle.require_engine(), state.config.limits
    body = await read_model(http, SpeechBody, limits, state.body_budget, from_form=form_fields)
    ignored = ignored_model(http.headers.get("model"), state.config)
    return await respond(http, state, fish_job(body, engine, limits, key, request_id(http), ignored=ignored))


@router.get("/v1/health", summary="Check that the server is up", responses=error_responses(401))
async def health(key: Caller) -> JSONResponse:
    return JSONResponse({"status": "ok"})


@router.post("/v1/health", summary="Check that the server is up", responses=error_responses(401, 429))
async def health_by_post(key: Caller) -> JSONResponse:
    return JSONResponse({"status": "ok"})
