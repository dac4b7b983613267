"""`POST /v1/text`: the text of a request as the model reads it, without generating speech."""

import asyncio

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from shoal.api.bodies.parsing import ALL, JSON
from shoal.api.bodies.schemas import SpeechBody, form_fields
from shoal.api.requests import fish_request, text_plan, with_key_lexicon
from shoal.server.openapi import error_responses, model_response, request_body
from shoal.server.request_body import read_model
from shoal.server.state import Caller, State, bearer
from shoal.server.streaming_response import run_for_client
from shoal.text.plan import TextPlan

router = APIRouter(tags=["Text"], dependencies=[Depends(bearer)])

EXAMPLES = {"markup": {"value": {"text": "Dr. Smith paid $5. [pause:0.5s] *Really.*"}}}


class PreparedTurn(BaseModel):
    text: str
    voice: str | None  # named by the markup
    rate: float
    volume: float  # decibels
    pause_after: float  # seconds


class SpokenText(BaseModel):
    """Text as the model reads it: in one piece, with pauses in brackets, and turn by turn."""

    text: str
    pause_before: float  # seconds
    turns: list[PreparedTurn]


@router.post(
    "/v1/text",
    summary="Show the text as the model reads it",
    response_class=JSONResponse,
    responses=model_response(SpokenText, JSON) | error_responses(400, 401, 408, 413, 415, 422, 429, 503),
    openapi_extra=request_body(SpeechBody, ALL, EXAMPLES),
)
async def show_text(http: Request, state: State, key: Caller) -> JSONResponse:
    engine, limits = state.lifecycle.require_engine(), state.config.limits
    body = await read_model(http, SpeechBody, limits, state.body_budget, from_form=form_fields)
    request = with_key_lexicon(fish_request(body, limits), key)
    plan = await run_for_client(http, state, key, "text", lambda: asyncio.to_thread(text_plan, request, engine))
    return JSONResponse(spoken_text(plan).model_dump())


def spoken_text(plan: TextPlan) -> SpokenText:
    turns = [
        PreparedTurn(
            text=turn.text,
            voice=turn.delivery.voice,
            rate=turn.delivery.rate,
            volume=turn.delivery.decibels,
            pause_after=turn.pause_after,
        )
        for turn in plan.turns
    ]
    return SpokenText(text=plan.text, pause_before=plan.pause_before, turns=turns)
