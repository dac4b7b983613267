"""`/v1/references/*`: voices kept under a name. Answers are MessagePack unless JSON is asked for, as upstream's are."""

import asyncio
from typing import Annotated

import ormsgpack
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from shoal.api.exceptions import SchemaViolation
from shoal.api.fields import VOICE_NAME, Body, VoiceName
from shoal.server.openapi import answers, body_of, form_of, returns
from shoal.server.parsing import JSON, MSGPACK, file_of, no_other_parts, read_form, read_model, text_of, validated
from shoal.server.state import AtDesk, Caller, bearer

router = APIRouter(tags=["Voices"], prefix="/v1/references", dependencies=[Depends(bearer)])


class Rename(Body):
    old_reference_id: VoiceName
    new_reference_id: VoiceName


class Removal(Body):
    reference_id: VoiceName


class NewVoice(Body):
    id: VoiceName


class VoiceChanged(BaseModel):
    success: bool
    message: str
    reference_id: str


class VoiceRenamed(BaseModel):
    success: bool
    message: str
    old_reference_id: str
    new_reference_id: str


class VoiceList(BaseModel):
    success: bool
    reference_ids: list[str]
    message: str


NEW_VOICE = {
    "id": {"type": "string", "pattern": VOICE_NAME, "maxLength": 255},
    "audio": {"type": "string", "format": "binary", "description": "10 to 30 seconds of one speaker."},
    "text": {"type": "string", "minLength": 1, "description": "What is said in the recording."},
}
REFUSALS = answers(400, 401, 404, 408, 409, 413, 415, 422, 429, 503)


Format = Annotated[str | None, Query(description="json or msgpack; goes before the Accept header.")]


async def how_to_answer(request: Request, format: Format = None) -> str:
    """The kind of answer that is wanted."""
    if format not in (None, "json", "msgpack"):
        raise SchemaViolation([{"type": "enum", "loc": ["query", "format"], "msg": "json or msgpack"}])
    if format is not None:
        return JSON if format == "json" else MSGPACK
    accept = request.headers.get("accept", "")
    return JSON if JSON in accept and MSGPACK not in accept else MSGPACK


Kind = Annotated[str, Depends(how_to_answer)]


@router.post(
    "/add",
    summary="Keep a voice",
    responses=returns(VoiceChanged, JSON, MSGPACK) | REFUSALS,
    openapi_extra=form_of(NEW_VOICE),
)
async def add(http: Request, desk: AtDesk, key: Caller, kind: Kind) -> Response:
    store = desk.host.engine().voices
    form = await read_form(http, desk.config.limits, desk.budget)
    no_other_parts(form, "id", "audio", "text")
    name = validated(NewVoice, {"id": text_of(form, "id")}).id
    await asyncio.to_thread(store.add, name, file_of(form, "audio"), text_of(form, "text"))
    return answer(VoiceChanged(success=True, message=f"voice {name} was added", reference_id=name), kind)


@router.get("/list", summary="List the voices", responses=returns(VoiceList, JSON, MSGPACK) | answers(401, 422, 503))
async def list_voices(desk: AtDesk, key: Caller, kind: Kind) -> Response:
    names = await asyncio.to_thread(desk.host.engine().voices.names)
    return answer(VoiceList(success=True, reference_ids=names, message=f"{len(names)} voices"), kind)


@router.post(
    "/update",
    summary="Rename a voice",
    responses=returns(VoiceRenamed, JSON, MSGPACK) | REFUSALS,
    openapi_extra=body_of(Rename, (JSON, MSGPACK)),
)
async def rename(http: Request, desk: AtDesk, key: Caller, kind: Kind) -> Response:
    store = desk.host.engine().voices
    body = await read_model(http, Rename, desk.config.limits, desk.budget)
    old, new = body.old_reference_id, body.new_reference_id
    await asyncio.to_thread(store.rename, old, new)
    said = f"voice {old} is now {new}"
    return answer(VoiceRenamed(success=True, message=said, old_reference_id=old, new_reference_id=new), kind)


@router.delete(
    "/delete",
    summary="Delete a voice",
    responses=returns(VoiceChanged, JSON, MSGPACK) | REFUSALS,
    openapi_extra=body_of(Removal, (JSON, MSGPACK)),
)
async def delete(http: Request, desk: AtDesk, key: Caller, kind: Kind) -> Response:
    store = desk.host.engine().voices
    body = await read_model(http, Removal, desk.config.limits, desk.budget)
    await asyncio.to_thread(store.delete, body.reference_id)
    said = f"voice {body.reference_id} was deleted"
    return answer(VoiceChanged(success=True, message=said, reference_id=body.reference_id), kind)


def answer(content: BaseModel, kind: str) -> Response:
    if kind == JSON:
        return JSONResponse(content.model_dump())
    return Response(ormsgpack.packb(content.model_dump()), media_type=MSGPACK)
