"""`/v1/vqgan/*`: encode recordings to codes and decode codes to samples, without the language model."""

import asyncio
from functools import partial
from math import ceil
from typing import Annotated, Any

import numpy as np
import ormsgpack
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field

from shoal.api.engine_client import SpeechService
from shoal.api.exceptions import wrong_field
from shoal.api.parsing import JSON, MSGPACK
from shoal.api.schemas import AudioBytes, Body, Integer
from shoal.server.openapi import error_responses, model_response, request_body
from shoal.server.request_body import read_model
from shoal.server.state import Caller, State, bearer
from shoal.server.streaming_response import run_for_client
from shoal.speech import Samples
from shoal.text.prompt import Codes

router = APIRouter(tags=["Codec"], prefix="/v1/vqgan", dependencies=[Depends(bearer)])

Matrix = list[list[Annotated[Integer, Field(ge=0, lt=2**31)]]]


class Audios(Body):
    audios: Annotated[list[AudioBytes], Field(min_length=1, max_length=16)]


class Tokens(Body):
    """One matrix [codebooks, frames] per recording."""

    tokens: Annotated[list[Matrix], Field(min_length=1, max_length=16)]


ERRORS = error_responses(400, 401, 408, 413, 415, 422, 429, 503, 504)


@router.post(
    "/encode",
    summary="Encode recordings to codes",
    responses=model_response(Tokens, MSGPACK) | ERRORS,
    openapi_extra=request_body(Audios, (JSON, MSGPACK)),
)
async def encode(http: Request, state: State, key: Caller) -> Response:
    engine = state.lifecycle.require_engine()
    body = await read_model(http, Audios, state.config.limits, state.body_budget)
    tokens = await run_for_client(http, state, key, "codec", partial(_encode_all, engine.service, body.audios))
    return _packed({"tokens": tokens})


@router.post(
    "/decode",
    summary="Decode codes to float16 samples",
    responses=model_response(Audios, MSGPACK) | ERRORS,
    openapi_extra=request_body(Tokens, (JSON, MSGPACK)),
)
async def decode(http: Request, state: State, key: Caller) -> Response:
    engine = state.lifecycle.require_engine()
    body = await read_model(http, Tokens, state.config.limits, state.body_budget)
    max_frames = ceil(state.config.limits.reference_seconds * engine.frame_rate)
    matrices = await asyncio.to_thread(lambda: [code_matrix(tokens, max_frames) for tokens in body.tokens])
    audios = await run_for_client(http, state, key, "codec", partial(_decode_all, engine.service, matrices))
    return _packed({"audios": audios})


def code_matrix(tokens: list[list[int]], max_frames: int) -> Codes:
    """Return codes [codebooks, frames]. Raises SchemaViolation for ragged rows or more than `max_frames` frames."""
    lengths = {len(row) for row in tokens}
    if len(lengths) != 1 or 0 in lengths:
        raise wrong_field("tokens", "all rows of a matrix must have the same length, at least one frame")
    if max(lengths) > max_frames:
        raise wrong_field(
            "tokens",
            f"a matrix may have at most {max_frames:,} frames (setting reference_seconds): send longer ones in parts",
        )
    return np.asarray(tokens, np.int32)


async def _encode_all(service: SpeechService, audios: list[bytes]) -> list[list[list[int]]]:
    """Encode one recording at a time, so that other requests are served in between."""
    return [(await service.aencode(audio)).tolist() for audio in audios]


async def _decode_all(service: SpeechService, matrices: list[Codes]) -> list[bytes]:
    """Decode one matrix at a time, so that other requests are served in between."""
    return [await asyncio.to_thread(_float16_bytes, await service.adecode(codes)) for codes in matrices]


def _float16_bytes(samples: Samples) -> bytes:
    return samples.astype("<f2").tobytes()


def _packed(content: dict[str, Any]) -> Response:
    return Response(ormsgpack.packb(content), media_type=MSGPACK)
