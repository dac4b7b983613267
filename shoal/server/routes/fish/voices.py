"""`/v1/references/*`: manage stored voices. Responses are MessagePack unless JSON is requested, as upstream's are."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Any, Literal

import ormsgpack
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from shoal.api.bodies.parsing import JSON, MSGPACK, check_parts, file_part, text_part, validated
from shoal.api.bodies.schemas import VOICE_NAME, Body, VoiceName
from shoal.api.exceptions import SchemaViolation
from shoal.api.voices.upload import check_recording, store_recordings
from shoal.errors import counted
from shoal.server.openapi import error_responses, form_body, model_response, request_body
from shoal.server.request_body import read_form, read_model
from shoal.server.state import Caller, State, bearer
from shoal.server.streaming_response import run_for_client
from shoal.voices.description import VoiceDescription

router = APIRouter(tags=["Voices"], prefix="/v1/references", dependencies=[Depends(bearer)])


class VoiceRename(Body):
    old_reference_id: VoiceName
    new_reference_id: VoiceName


class VoiceRemoval(Body):
    reference_id: VoiceName


class NewVoice(Body):
    id: VoiceName


class VoiceFields(Body):
    """Description of a voice, shown in lists of voices. It does not affect the audio."""

    title: Annotated[str, Field(max_length=80, description="Name to display.")] = ""
    description: Annotated[str, Field(max_length=500, description="Character and use of the voice.")] = ""
    gender: Annotated[Literal["", "female", "male", "neutral"], Field(description="Gender of the voice.")] = ""
    accent: Annotated[str, Field(max_length=60, description="Accent, such as `British`.")] = ""
    preview: Annotated[str, Field(max_length=300, description="Sentence that a preview speaks.")] = ""


class DescribedVoice(VoiceFields):
    reference_id: VoiceName


class RecordingFinding(BaseModel):
    code: str
    message: str


class RecordingChecked(BaseModel):
    """Measures of a recording, and findings: reasons why the voice would sound worse than it could."""

    seconds: float
    sample_rate: int
    channels: int
    level_db: float  # level of the speech, in decibels below full scale
    noise_db: float  # level of the quietest moments
    clipped: float  # fraction of samples at full scale
    speech_seconds: float
    findings: list[RecordingFinding]


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


NEW_VOICE: dict[str, Any] = {
    "id": {"type": "string", "pattern": VOICE_NAME, "maxLength": 255},
    "audio": {"type": "string", "format": "binary", "description": "Recording of one speaker, 10 to 30 seconds."},
    "text": {"type": "string", "minLength": 1, "description": "Transcript of the recording. Default: by a recogniser."},
}
NEW_VOICE |= {
    name: {"type": "string", "description": field.description} for name, field in VoiceFields.model_fields.items()
}
CHECKED_RECORDING = {
    "audio": {"type": "string", "format": "binary", "description": "Recording of one speaker, 10 to 30 seconds."},
    "text": {"type": "string", "description": "Transcript, to compare its length with the recording's."},
}
ERRORS = error_responses(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504)

FormatParameter = Annotated[
    str | None, Query(description="Response format, json or msgpack; takes precedence over the Accept header.")
]


async def response_type(request: Request, format: FormatParameter = None) -> str:
    """Return the media type to respond with."""
    if format not in (None, "json", "msgpack"):
        raise SchemaViolation([{"type": "enum", "loc": ["query", "format"], "msg": "json or msgpack"}])
    if format is not None:
        return JSON if format == "json" else MSGPACK
    accept = request.headers.get("accept", "")
    return JSON if JSON in accept and MSGPACK not in accept else MSGPACK


ResponseType = Annotated[str, Depends(response_type)]


@router.post(
    "/add",
    summary="Store a voice",
    responses=model_response(VoiceChanged, JSON, MSGPACK) | ERRORS,
    openapi_extra=form_body(NEW_VOICE, required=("id", "audio")),
)
async def add(http: Request, state: State, key: Caller, kind: ResponseType) -> Response:
    store = state.lifecycle.require_engine().voices
    form = await read_form(http, state.config.limits, state.body_budget)
    check_parts(form, *NEW_VOICE)
    name = validated(NewVoice, {"id": text_part(form, "id")}).id
    clip = file_part(form, "audio"), text_part(form, "text") if "text" in form else None
    fields = validated(VoiceFields, {part: text_part(form, part) for part in VoiceFields.model_fields if part in form})
    about = VoiceDescription(**fields.model_dump())
    await run_for_client(http, state, key, "voices", lambda: store_recordings(state, store, name, [clip], about))
    return respond(VoiceChanged(success=True, message=f"voice {name} was added", reference_id=name), kind)


@router.post(
    "/check",
    summary="Check a recording before it becomes a voice",
    responses=model_response(RecordingChecked, JSON, MSGPACK) | ERRORS,
    openapi_extra=form_body(CHECKED_RECORDING, required=("audio",)),
)
async def check(http: Request, state: State, key: Caller, kind: ResponseType) -> Response:
    store = state.lifecycle.require_engine().voices
    form = await read_form(http, state.config.limits, state.body_budget)
    check_parts(form, *CHECKED_RECORDING)
    audio, text = file_part(form, "audio"), text_part(form, "text") if "text" in form else None
    report = await run_for_client(http, state, key, "voices", lambda: check_recording(state, store, audio, text))
    return respond(RecordingChecked(**asdict(report)), kind)


@router.post(
    "/describe",
    summary="Set the title, the description and the preview of a voice",
    responses=model_response(VoiceChanged, JSON, MSGPACK) | ERRORS,
    openapi_extra=request_body(DescribedVoice, (JSON, MSGPACK)),
)
async def describe(http: Request, state: State, key: Caller, kind: ResponseType) -> Response:
    store = state.lifecycle.require_engine().voices
    body = await read_model(http, DescribedVoice, state.config.limits, state.body_budget)
    about = VoiceDescription(**body.model_dump(exclude={"reference_id"}))
    await asyncio.to_thread(store.describe, body.reference_id, about)
    message = f"voice {body.reference_id} was described"
    return respond(VoiceChanged(success=True, message=message, reference_id=body.reference_id), kind)


@router.get(
    "/list",
    summary="List the voices",
    responses=model_response(VoiceList, JSON, MSGPACK) | error_responses(401, 422, 503),
)
async def list_voices(state: State, key: Caller, kind: ResponseType) -> Response:
    names = await asyncio.to_thread(state.lifecycle.require_engine().voices.names)
    return respond(VoiceList(success=True, reference_ids=names, message=counted(len(names), "voice")), kind)


@router.post(
    "/update",
    summary="Rename a voice",
    responses=model_response(VoiceRenamed, JSON, MSGPACK) | ERRORS,
    openapi_extra=request_body(VoiceRename, (JSON, MSGPACK)),
)
async def rename(http: Request, state: State, key: Caller, kind: ResponseType) -> Response:
    store = state.lifecycle.require_engine().voices
    body = await read_model(http, VoiceRename, state.config.limits, state.body_budget)
    old, new = body.old_reference_id, body.new_reference_id
    await asyncio.to_thread(store.rename, old, new)
    message = f"voice {old} is now {new}"
    return respond(VoiceRenamed(success=True, message=message, old_reference_id=old, new_reference_id=new), kind)


@router.delete(
    "/delete",
    summary="Delete a voice",
    responses=model_response(VoiceChanged, JSON, MSGPACK) | ERRORS,
    openapi_extra=request_body(VoiceRemoval, (JSON, MSGPACK)),
)
async def delete(http: Request, state: State, key: Caller, kind: ResponseType) -> Response:
    store = state.lifecycle.require_engine().voices
    body = await read_model(http, VoiceRemoval, state.config.limits, state.body_budget)
    await asyncio.to_thread(store.delete, body.reference_id)
    message = f"voice {body.reference_id} was deleted"
    return respond(VoiceChanged(success=True, message=message, reference_id=body.reference_id), kind)


def respond(content: BaseModel, kind: str) -> Response:
    if kind == JSON:
        return JSONResponse(content.model_dump())
    return Response(ormsgpack.packb(content.model_dump()), media_type=MSGPACK)
