"""`POST /v1/convert`: convert a wav file to another format, so that a client need not generate the speech again.

Only wav is accepted: it cannot decompress to more than was uploaded. The file is read, resampled and encoded block by
block on a dedicated thread, so that an hour of audio needs little memory and delays no speech.
"""

import asyncio
from collections.abc import Iterator
from functools import partial

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from shoal.api.bodies.parsing import check_parts, file_part, text_part, validated
from shoal.api.bodies.schemas import Body, Format
from shoal.api.output import OutputEncoder, OutputOptions
from shoal.api.state import ServerState
from shoal.audio.decode import AudioLimits, limited_blocks, mono, peak_amplitude
from shoal.audio.formats import FORMATS
from shoal.audio.wav import is_wav, open_wav
from shoal.errors import AudioError
from shoal.server.openapi import audio_response, error_responses, form_body
from shoal.server.request_body import read_form
from shoal.server.state import Caller, State, bearer
from shoal.server.streaming_response import run_for_client

router = APIRouter(tags=["Fish"], dependencies=[Depends(bearer)])

LIMITS = AudioLimits(min_seconds=0.0, max_seconds=3600.0)


class ConvertFields(Body):
    format: Format


FIELDS = {
    "audio": {"type": "string", "format": "binary", "description": "A wav file."},
    "format": {"type": "string", "enum": list(FORMATS), "description": "Audio format of the response."},
}


@router.post(
    "/v1/convert",
    summary="Convert a wav file to another format",
    response_class=Response,
    responses=audio_response() | error_responses(400, 401, 408, 413, 415, 422, 429, 501, 504),
    openapi_extra=form_body(FIELDS),
)
async def convert(http: Request, state: State, key: Caller) -> Response:
    form = await read_form(http, state.config.limits, state.body_budget)
    check_parts(form, *FIELDS)
    format = validated(ConvertFields, {"format": text_part(form, "format")}).format
    output = OutputOptions(format)
    work = partial(_run_steps, state, conversion_steps(file_part(form, "audio"), output))
    return Response(
        await run_for_client(http, state, key, "convert", work),
        media_type=output.media_type,
        headers={"Content-Disposition": f"attachment; filename=audio.{format}"},
    )


async def _run_steps(state: ServerState, steps: Iterator[bytes]) -> bytes:
    """Return the last step's result. Conversions interleave step by step, and can be cancelled between steps."""
    loop, content = asyncio.get_running_loop(), b""
    while (result := await loop.run_in_executor(state.convert_pool, next, steps, None)) is not None:
        content = result
    return content


def conversion_steps(audio: bytes, output: OutputOptions) -> Iterator[bytes]:
    """Convert in steps of bounded size; the last one yields the file. Raises AudioError if `audio` is not PCM wav."""
    reader = open_wav(audio) if is_wav(audio) else None
    if reader is None:
        raise AudioError("only wav files can be converted: send a wav file")
    # Two passes: if any sample exceeds full scale, the whole file is attenuated.
    peak = 1.0
    for _, block in limited_blocks(reader, LIMITS):
        peak = max(peak, peak_amplitude(mono(block)))
        yield b""
    encoder = OutputEncoder(output, reader.rate, stream=False)
    for _, block in reader.blocks():
        encoder.feed(mono(block) / np.float32(peak))
        yield b""
    yield encoder.finish()
