"""`/v1/vqgan/*`: encode recordings to codes and decode codes to samples, without the language model."""

import asyncio
from functools import partial
from math import ceil
from typing import Annotated, Any

import numpy as np
import ormsgpack
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field, PlainValidator, WithJsonSchema

from shoal.api.bodies.parsing import JSON, MSGPACK
from shoal.api.bodies.scan import MAX_ELEMENTS
from shoal.api.bodies.schemas import AudioBytes, Body
from shoal.api.engine_client import SpeechService
from shoal.api.exceptions import wrong_field
from shoal.server.openapi import error_responses, model_response, request_body
from shoal.server.request_body import read_model
from shoal.server.state import Caller, State, bearer
from shoal.server.streaming_response import run_for_client
from shoal.speech import Samples
from shoal.text.prompt import Codes

router = APIRouter(tags=["Codec"], prefix="/v1/vqgan", dependencies=[Depends(bearer)])

MAX_RECORDINGS = 16
MAX_CODEBOOKS = 32
CODE_RANGE = "codes are integers from 0 to 2147483647"
MATRICES = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_RECORDINGS,
    "items": {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_CODEBOOKS,
        "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
    },
}


def code_matrices(content: Any) -> list[Codes]:
    """Return matrices [codebooks, frames]. Raises one ValueError, not one per element, which pydantic would."""
    if not isinstance(content, list) or not 1 <= len(content) <= MAX_RECORDINGS:
        raise ValueError(f"send a list of 1 to {MAX_RECORDINGS} matrices")
    return [_code_matrix(rows) for rows in content]


def _code_matrix(rows: Any) -> Codes:
    if (
        not isinstance(rows, list)
        or not 1 <= len(rows) <= MAX_CODEBOOKS
        or not all(isinstance(row, list) for row in rows)
    ):
        raise ValueError(f"a matrix is a list of 1 to {MAX_CODEBOOKS} rows, one per codebook")
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError("all rows of a matrix must have the same length, at least one frame")
    # numpy would convert strings and booleans too.
    if not {type(code) for row in rows for code in row} <= {int, float}:
        raise ValueError("codes are integers")
    try:
        codes = np.asarray(rows, np.float64)  # exact for the allowed range; some clients send 200.0 for 200
    except OverflowError:
        raise ValueError(CODE_RANGE) from None
    if not ((codes >= 0) & (codes < 2**31) & (codes == np.floor(codes))).all():
        raise ValueError(CODE_RANGE)
    return codes.astype(np.int32)


class Audios(Body):
    audios: Annotated[list[AudioBytes], Field(min_length=1, max_length=MAX_RECORDINGS, fail_fast=True)]


class Tokens(Body):
    """One matrix [codebooks, frames] per recording."""

    tokens: Annotated[list[Codes], PlainValidator(code_matrices), WithJsonSchema(MATRICES)]


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
    max_frames = ceil(state.config.limits.reference_seconds * engine.frame_rate)
    max_elements = MAX_ELEMENTS + MAX_RECORDINGS * MAX_CODEBOOKS * max_frames
    body = await read_model(http, Tokens, state.config.limits, state.body_budget, max_elements=max_elements)
    if max(codes.shape[1] for codes in body.tokens) > max_frames:
        raise wrong_field(
            "tokens",
            f"a matrix may have at most {max_frames:,} frames (setting reference_seconds): send longer ones in parts",
        )
    audios = await run_for_client(http, state, key, "codec", partial(_decode_all, engine.service, body.tokens))
    return _packed({"audios": audios})


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
