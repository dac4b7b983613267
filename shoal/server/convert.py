"""`POST /v1/convert`: speech that was heard already, in another format; nothing is spoken again.

Only wav is taken: it cannot unfold into more than was sent. It is read, resampled and encoded block by block, on a
thread that speech does not need, so that an hour of it takes little memory and holds up nobody.
"""

import asyncio
from collections.abc import Iterator
from functools import partial
from math import isfinite

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from shoal.audio.decode import CUT_SECONDS, CUT_SHARE
from shoal.audio.formats import FORMATS, HIGHEST_RATE, LOWEST_RATE
from shoal.audio.wav import WavReader, is_wav, open_wav
from shoal.errors import AudioError
from shoal.server.bodies import file_of, no_other_parts, read_form, text_of, validated
from shoal.server.desk import AtDesk, Caller, Desk, bearer
from shoal.server.errand import run_errand
from shoal.server.fields import Body
from shoal.server.fish_body import Format
from shoal.server.openapi import answers, form_of, returns_audio
from shoal.server.rendering import Renderer, Rendering
from shoal.speech import Samples

router = APIRouter(tags=["Fish"], dependencies=[Depends(bearer)])

MOST_SECONDS = 3600.0
MOST_CHANNELS = 2
RATES = range(LOWEST_RATE, HIGHEST_RATE + 1)


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
    _check_layout(reader)
    # Twice over the samples: what is louder than full scale is brought down as a whole.
    peak, seconds = 1.0, 0.0
    for block in _mono(reader):
        peak, seconds = max(peak, _peak(block)), seconds + len(block) / reader.rate
        _check_length(seconds)
        yield b""
    _check_whole(reader, seconds)
    renderer = Renderer(rendering, reader.rate, stream=False)
    for block in _mono(reader):
        renderer.feed(block / np.float32(peak))
        yield b""
    yield renderer.finish()


def _mono(reader: WavReader) -> Iterator[Samples]:
    """The average of the channels, so that nothing can clip."""
    for _, block in reader.blocks():
        yield block.mean(axis=1, dtype=np.float64).astype(np.float32)


def _peak(block: Samples) -> float:
    peak = float(np.abs(block).max(initial=0.0))
    if not isfinite(peak):
        raise AudioError("The recording holds samples that are not numbers, or too large to work with.")
    return peak


def _check_layout(reader: WavReader) -> None:
    _check_length(reader.promised_seconds or 0.0)
    if reader.channels > MOST_CHANNELS:
        raise AudioError(f"The recording has {reader.channels} channels; at most {MOST_CHANNELS} are taken.")
    if reader.rate not in RATES:
        raise AudioError(f"The recording's sample rate is {reader.rate} Hz; it must be {RATES[0]} to {RATES[-1]} Hz.")


def _check_length(seconds: float) -> None:
    if seconds > MOST_SECONDS:
        raise AudioError(f"The recording is longer than {MOST_SECONDS:g} seconds.")


def _check_whole(reader: WavReader, seconds: float) -> None:
    promised = reader.promised_seconds or 0.0
    if promised - seconds > max(CUT_SECONDS, CUT_SHARE * promised):
        raise AudioError(f"The recording is cut off: {seconds:.1f} of {promised:.1f} seconds are there.")
    if not seconds:
        raise AudioError("Nothing in the recording can be decoded.")
