"""`POST /v1/convert`: speech that was heard already, in another format; nothing is spoken again.

Only wav is taken: it cannot unfold into more than was sent.
"""

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from shoal.audio.decode import AudioLimits, read_audio
from shoal.audio.formats import FORMATS
from shoal.audio.wav import is_wav, open_wav
from shoal.errors import AudioError
from shoal.server.bodies import file_of, no_other_parts, read_form, text_of, validated
from shoal.server.desk import AtDesk, Caller, bearer
from shoal.server.fields import Body
from shoal.server.fish_body import Format
from shoal.server.openapi import answers, form_of, returns_audio
from shoal.server.rendering import Renderer, Rendering

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
    responses=returns_audio() | answers(400, 401, 408, 413, 415, 422, 429, 501),
    openapi_extra=form_of(FIELDS),
)
async def convert(http: Request, desk: AtDesk, key: Caller) -> Response:
    form = await read_form(http, desk.config.limits, desk.budget)
    no_other_parts(form, *FIELDS)
    wanted = validated(Wanted, {"format": text_of(form, "format")}).format
    rendering = Rendering(wanted)
    content = await desk.encode(converted, file_of(form, "audio"), rendering)
    return Response(
        content,
        media_type=rendering.media_type,
        headers={"Content-Disposition": f"attachment; filename=audio.{wanted}"},
    )


def converted(audio: bytes, rendering: Rendering) -> bytes:
    """Raises AudioError for anything but a wav file of plain samples."""
    reader = open_wav(audio) if is_wav(audio) else None
    if reader is None:
        raise AudioError("Send a wav file; other recordings are not converted.")
    heard = read_audio(audio, reader.rate, LIMITS)
    renderer = Renderer(rendering, heard.sample_rate, stream=False)
    renderer.feed(heard.samples)
    return renderer.finish()
