"""The contract of a SageMaker container: `GET /ping`, `POST /invocations`.

An invocation is a body of the Fish or of the OpenAI API, told apart by `text` or `input`. It is streamed where the body
says so, which SageMaker passes on when it is invoked with a response stream.
"""

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import RootModel, model_validator

from shoal.api.fish_body import SpeechBody
from shoal.server.middleware.request_id import request_id
from shoal.server.openapi import answers, reference, returns_audio
from shoal.server.parsing import JSON, MSGPACK, read_model, validated
from shoal.server.routes.fish import fish_order, headers_for
from shoal.server.routes.openai import EVENT_STREAM, OpenAISpeech, spoken
from shoal.server.state import AtDesk, Caller, bearer
from shoal.server.streaming_response import perform

router = APIRouter(tags=["SageMaker"])


class Invocation(RootModel[dict[str, Any]]):
    @model_validator(mode="after")
    def _one_of_two(self) -> "Invocation":
        if "input" in self.root and "text" in self.root:
            raise ValueError("send `text` (Fish) or `input` (OpenAI), not both")
        return self


EITHER = {"schema": {"oneOf": [reference("SpeechBody"), reference("OpenAISpeech")]}}


@router.get("/ping", summary="Is the container ready?", responses={503: {"description": "Not yet."}})
async def ping(desk: AtDesk) -> JSONResponse:
    return JSONResponse({"state": desk.host.state}, 200 if desk.host.state == "ready" else 503)


@router.post(
    "/invocations",
    summary="Speak a text",
    response_class=Response,
    dependencies=[Depends(bearer)],
    responses=returns_audio(EVENT_STREAM) | answers(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504),
    openapi_extra={"requestBody": {"required": True, "content": {JSON: EITHER, MSGPACK: EITHER}}},
)
async def invoke(http: Request, desk: AtDesk, key: Caller) -> Response:
    desk.host.engine()
    content = (await read_model(http, Invocation, desk.config.limits, desk.budget)).root
    if "input" in content:
        return await spoken(http, validated(OpenAISpeech, content), desk, key)
    order = fish_order(validated(SpeechBody, content), desk, key, request_id(http), api="sagemaker")
    return await perform(http, desk, order, headers_for(order, desk))
