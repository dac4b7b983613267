"""The SageMaker container contract: `GET /ping`, `POST /invocations`.

An invocation is a body of the Fish API (it has `text`) or of the OpenAI API (it has `input`). The response is streamed
if the body asks for it; SageMaker forwards the stream to clients that invoke with a response stream.
"""

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from shoal.api.bodies.parsing import JSON, MSGPACK, validated
from shoal.api.bodies.schemas import Invocation, OpenAISpeech, SpeechBody
from shoal.api.requests import fish_job
from shoal.server.middleware.request_id import request_id
from shoal.server.openapi import audio_response, error_responses, reference
from shoal.server.request_body import read_model
from shoal.server.routes.openai.speech import EVENT_STREAM, respond_openai
from shoal.server.state import Caller, State, bearer
from shoal.server.streaming_response import respond

router = APIRouter(tags=["SageMaker"])

EITHER_BODY = {"schema": {"oneOf": [reference("SpeechBody"), reference("OpenAISpeech")]}}


@router.head("/ping", include_in_schema=False)
@router.get("/ping", summary="Check that the container is ready", responses={503: {"description": "Not ready."}})
async def ping(state: State) -> JSONResponse:
    return JSONResponse({"state": state.lifecycle.state}, 200 if state.lifecycle.state == "ready" else 503)


@router.post(
    "/invocations",
    summary="Generate speech from text",
    response_class=Response,
    dependencies=[Depends(bearer)],
    responses=audio_response(EVENT_STREAM)
    | error_responses(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504),
    openapi_extra={"requestBody": {"required": True, "content": {JSON: EITHER_BODY, MSGPACK: EITHER_BODY}}},
)
async def invoke(http: Request, state: State, key: Caller) -> Response:
    engine, limits = state.lifecycle.require_engine(), state.config.limits
    content = (await read_model(http, Invocation, limits, state.body_budget)).root
    if "input" in content:
        return await respond_openai(http, validated(OpenAISpeech, content), state, engine, key)
    body = validated(SpeechBody, content)
    return await respond(http, state, fish_job(body, engine, limits, key, request_id(http), api="sagemaker"))
