"""`POST /v1/convert`: speech that was heard already, in another format; nothing is spoken again.

Only wav is taken: it cannot unfold into more than was sent. It is read, resampled and encoded block by block, on a
thread that speech does not need, so that an hour of it takes little memory and holds up nobody.
"""

import asyncio
from collections.abc import Iterator
from functools import partial

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from shoal.api.errand import run_errand
from shoal.api.fields import Body
from shoal.api.fish_body import Format
from shoal.api.output import Renderer, Rendering
from shoal.audio.decode import AudioLimits, limited_blocks, mono, peak_amplitude
from shoal.audio.formats import FORMATS
from shoal.audio.wav import is_wav, open_wav
from shoal.errors import AudioError
from shoal.server.openapi import answers, form_of, returns_audio
from shoal.server.parsing import file_of, no_other_parts, read_form, text_of, validated
from shoal.server.state import AtDesk, Caller, Desk, bearer

router = APIRouter(tags=["Fish"], dependencies=[Depends(bearer)])

LIMITS = AudioLimits(min_seconds=0.0, max_seconds=3600.0)


class Wanted(Body):
    format: Format


FIELDS = {
    "audio": {"type": "string", "format": "binary", "description": "A wav file."},
    "format": {"type": "string", "enum": list(FORMATS)},
}


@router.post(
    "/v1/convert",
    summary="Put a wav file into another format",
    response_class=Response,
    responses=returns_audio() | answers(400, 401, 408, 413, 415, 422, 429, 501, 504),
    openapi_extra=form_of(FIELDS),
)
async def convert(http: Request, desk: AtDesk, key: Caller) -> Response:
    form = await read_form(http, desk.config.limits, desk.budget)
    no_other_parts(form, *FIELDS)
    wanted = validated(Wanted, {"format": text_of(form, "format")}).format
    rendering = Rendering(wanted)
    work = partial(_last, desk, conversion(file_of(form, "audio"), rendering))
    return Response(
        await run_errand(http, desk, key, "convert", work),
        media_type=rendering.media_type,
        headers={"Content-Disposition": f"attachment; filename=audio.{wanted}"},
    )


async def _last(desk: Desk, steps: Iterator[bytes]) -> bytes:
    """Conversions take turns step by step; between two steps one that nobody waits for ends."""
    loop, content = asyncio.get_running_loop(), b""
    while (made := await loop.run_in_executor(desk.converter, next, steps, None)) is not None:
        content = made
    return content


def conversion(audio: bytes, rendering: Rendering) -> Iterator[bytes]:
    """Steps of bounded size; the last gives the file. Raises AudioError for anything but a wav of plain samples."""
    reader = open_wav(audio) if is_wav(audio) else None
    if reader is None:
        raise AudioError("Send a wav file; other recordings are not converted.")
    # Twice over the samples: what is louder than full scale is brought down as a whole.
    peak = 1.0
    for _, block in limited_blocks(reader, LIMITS):
        peak = max(peak, peak_amplitude(mono(block)))
        yield b""
    renderer = Renderer(rendering, reader.rate, stream=False)
    for _, block in reader.blocks():
        renderer.feed(mono(block) / np.float32(peak))
        yield b""
    yield renderer.finish()
