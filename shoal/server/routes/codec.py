"""`/v1/vqgan/*`: recordings to codes and back, without a model in between."""

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
from shoal.api.errand import run_errand
from shoal.api.exceptions import wrong_field
from shoal.api.fields import AudioBytes, Body, Whole
from shoal.server.openapi import answers, body_of, returns
from shoal.server.parsing import JSON, MSGPACK, read_model
from shoal.server.state import AtDesk, Caller, bearer
from shoal.speech import Samples
from shoal.text.prompt import Codes

router = APIRouter(tags=["Codec"], prefix="/v1/vqgan", dependencies=[Depends(bearer)])

Matrix = list[list[Annotated[Whole, Field(ge=0, lt=2**31)]]]


class Audios(Body):
    audios: Annotated[list[AudioBytes], Field(min_length=1, max_length=16)]


class Tokens(Body):
    """Per recording a matrix of codebooks x frames."""

    tokens: Annotated[list[Matrix], Field(min_length=1, max_length=16)]


REFUSALS = answers(400, 401, 408, 413, 415, 422, 429, 503, 504)


@router.post(
    "/encode",
    summary="Recordings to codes",
    responses=returns(Tokens, MSGPACK) | REFUSALS,
    openapi_extra=body_of(Audios, (JSON, MSGPACK)),
)
async def encode(http: Request, desk: AtDesk, key: Caller) -> Response:
    service = desk.host.engine().service
    body = await read_model(http, Audios, desk.config.limits, desk.budget)
    tokens = await run_errand(http, desk, key, "codec", partial(_encoded, service, body.audios))
    return _packed({"tokens": tokens})


@router.post(
    "/decode",
    summary="Codes to float16 samples",
    responses=returns(Audios, MSGPACK) | REFUSALS,
    openapi_extra=body_of(Tokens, (JSON, MSGPACK)),
)
async def decode(http: Request, desk: AtDesk, key: Caller) -> Response:
    service = desk.host.engine().service
    body = await read_model(http, Tokens, desk.config.limits, desk.budget)
    most = ceil(desk.config.limits.reference_seconds * desk.host.engine().frame_rate)
    matrices = await asyncio.to_thread(lambda: [matrix_of(tokens, most) for tokens in body.tokens])
    audios = await run_errand(http, desk, key, "codec", partial(_decoded, service, matrices))
    return _packed({"audios": audios})


def matrix_of(tokens: list[list[int]], most: int) -> Codes:
    """Raises SchemaViolation for rows of different lengths, or of more than `most` frames."""
    lengths = {len(row) for row in tokens}
    if len(lengths) != 1 or 0 in lengths:
        raise wrong_field("tokens", "a matrix has rows of one length, and at least one frame")
    if max(lengths) > most:
        raise wrong_field(
            "tokens",
            f"a matrix has at most {most:,} frames here (the setting reference_seconds): send longer ones in parts",
        )
    return np.asarray(tokens, np.int32)


async def _encoded(service: SpeechService, audios: list[bytes]) -> list[list[list[int]]]:
    """One after the other, so that others come in between."""
    return [(await service.aencode(audio)).tolist() for audio in audios]


async def _decoded(service: SpeechService, matrices: list[Codes]) -> list[bytes]:
    """As `_encoded`."""
    return [await asyncio.to_thread(_halves, await service.adecode(codes)) for codes in matrices]


def _halves(samples: Samples) -> bytes:
    return samples.astype("<f2").tobytes()


def _packed(content: dict[str, Any]) -> Response:
    return Response(ormsgpack.packb(content), media_type=MSGPACK)
