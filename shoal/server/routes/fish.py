"""`POST /v1/tts` and `/v1/health`: the Fish API, as fish-speech's own server and Fish Audio's clients use it."""

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from shoal.api.config import Limits, ServerConfig
from shoal.api.engine_client import Loaded
from shoal.api.fish_body import SpeechBody, form_content
from shoal.api.requests import check_length, recordings_of, sampling_for
from shoal.api.speech_stream import Order
from shoal.errors import InvalidRequest
from shoal.server.keys import Key
from shoal.server.middleware.request_id import request_id
from shoal.server.openapi import answers, body_of, returns_audio
from shoal.server.parsing import ALL, read_model
from shoal.server.state import AtDesk, Caller, Desk, bearer
from shoal.server.streaming_response import perform
from shoal.speech import SpeechRequest

# What the published clients send in their `model` header; the model that is loaded answers.
CLIENT_MODELS = ("s2-pro", "s1", "s1-mini", "speech-1.5", "speech-1.6", "agent-x0")

router = APIRouter(tags=["Fish"], dependencies=[Depends(bearer)])

EXAMPLES = {
    "plain": {"value": {"text": "Hello there.", "format": "mp3"}},
    "streamed": {"value": {"text": "Hello there.", "format": "opus", "streaming": True, "seed": 7}},
    "stored voice": {"value": {"text": "Hello there.", "reference_id": "narrator", "prosody": {"speed": 1.2}}},
}


@router.post(
    "/v1/tts",
    summary="Speak a text",
    response_class=Response,
    responses=returns_audio() | answers(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504),
    openapi_extra=body_of(SpeechBody, ALL, EXAMPLES),
)
async def speak(http: Request, desk: AtDesk, key: Caller) -> Response:
    check_model_header(http.headers.get("model"), desk.config)
    desk.host.engine()
    body = await read_model(http, SpeechBody, desk.config.limits, desk.budget, from_form=form_content)
    order = fish_order(body, desk, key, request_id(http))
    return await perform(http, desk, order, headers_for(order, desk))


def fish_order(body: SpeechBody, desk: Desk, key: Key, id: str, *, api: str = "fish") -> Order:
    """Raises InvalidRequest and its kin for what cannot be done."""
    return Order(api, fish_request(body, desk.host.engine(), desk.config.limits), body.rendering(), key, id)


def fish_request(body: SpeechBody, loaded: Loaded, limits: Limits) -> SpeechRequest:
    pairs = [] if body.reference_id else [(each.audio, each.text) for each in body.references]
    return SpeechRequest(
        check_length(body.text, limits),
        voice=body.reference_id,
        recordings=recordings_of(pairs, limits),
        sampling=sampling_for(loaded, body),
        chunk_bytes=body.chunk_length,
        normalize=body.normalize,
        timeout=limits.request_seconds,
        whole=not body.streams,
    )


def headers_for(order: Order, desk: Desk) -> dict[str, str]:
    """What a client may want to know and cannot read from the bytes."""
    model_rate = desk.host.engine().service.sample_rate
    assert order.request.sampling is not None
    return {
        "Content-Disposition": f"attachment; filename=audio.{order.rendering.format}",
        "X-Sample-Rate": str(order.rendering.rate_for(model_rate)),
        "X-Channels": "1",
        "X-Seed": str(order.request.sampling.seed),
    }


def check_model_header(model: str | None, config: ServerConfig) -> None:
    if model is not None and model not in (*CLIENT_MODELS, config.model):
        raise InvalidRequest(f"the model header asks for {model[:64]!r}; this server speaks with {config.model!r}")


@router.get("/v1/health", summary="Is the server there?", responses=answers(401))
async def health(key: Caller) -> JSONResponse:
    return JSONResponse({"status": "ok"})


@router.post("/v1/health", summary="Is the server there?", responses=answers(401, 429))
async def health_by_post(key: Caller) -> JSONResponse:
    return JSONResponse({"status": "ok"})
