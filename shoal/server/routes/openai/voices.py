"""`/v1/audio/voices` and `/v1/audio/models`: voices as objects, for OpenAI's clients, Open WebUI and similar ones."""

import asyncio
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from shoal.api.bodies.parsing import JSON, check_parts, file_part, text_part, validated
from shoal.api.bodies.schemas import VOICE_NAME, Body, VoiceName
from shoal.api.keys import ANONYMOUS, Key
from shoal.api.requests import model_names
from shoal.api.voices.upload import store_recordings, store_speech
from shoal.errors import VoiceNotFound
from shoal.server.openapi import error_responses, form_body, model_response, schema_of
from shoal.server.request_body import media_type, read_form, read_model
from shoal.server.state import Caller, State, bearer, get_caller, state_of
from shoal.server.streaming_response import run_for_client
from shoal.voices.store import VoiceStore

router = APIRouter(tags=["OpenAI"], dependencies=[Depends(bearer)])

PATH = "/v1/audio/voices"


class AudioVoice(BaseModel):
    """A stored voice. `name` is for display: the title of the voice, or its id."""

    id: str
    object: Literal["audio.voice"] = "audio.voice"
    name: str
    created_at: int  # Unix time in seconds; 0 for a built-in voice
    type: Literal["audio_sample"] = "audio_sample"
    description: str = ""
    gender: str = ""
    accent: str = ""


class AudioVoiceList(BaseModel):
    """All voices, as OpenAI lists objects (`data`) and as Open WebUI and similar clients read them (`voices`)."""

    object: Literal["list"] = "list"
    data: list[AudioVoice]
    voices: list[AudioVoice]


class AudioVoiceDeleted(BaseModel):
    id: str
    object: Literal["audio.voice.deleted"] = "audio.voice.deleted"
    deleted: bool = True


class AudioModel(BaseModel):
    id: str


class AudioModelList(BaseModel):
    models: list[AudioModel]


class SpeechAsVoice(Body):
    """JSON body of `POST /v1/audio/voices`: keep the voice of an earlier request."""

    name: VoiceName
    request_id: Annotated[
        str, Field(min_length=1, max_length=128, description="Id of the request, from its X-Request-ID header.")
    ]


class RecordingAsVoice(Body):
    """Text fields of the form of `POST /v1/audio/voices`."""

    name: VoiceName
    type: Literal["audio_sample"] = "audio_sample"


FORM: dict[str, Any] = {
    "name": {"type": "string", "pattern": VOICE_NAME, "maxLength": 255},
    "audio_sample": {"type": "string", "format": "binary", "description": "Recording of one speaker."},
    "text": {"type": "string", "minLength": 1, "description": "Extension: transcript of the recording."},
    "consent": {"type": "string", "description": "Accepted without effect."},
    "type": {"type": "string", "enum": ["audio_sample"]},
}
NEW_VOICE = form_body(FORM, required=("name", "audio_sample"))
NEW_VOICE["requestBody"]["content"][JSON] = {"schema": schema_of(SpeechAsVoice)}
ERRORS = error_responses(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504, openai=True)


async def get_reader(request: Request) -> Key:
    """Authenticate a client that lists voices, unless the server lists them without a key."""
    return ANONYMOUS if state_of(request).config.public_voices else await get_caller(request)


Reader = Annotated[Key, Depends(get_reader)]


@router.get(
    PATH,
    summary="List the voices",
    responses=model_response(AudioVoiceList, JSON) | error_responses(401, 503, openai=True),
)
async def voices(state: State, key: Reader) -> JSONResponse:
    store = state.lifecycle.require_engine().voices
    found = await asyncio.to_thread(lambda: [_voice(store, name) for name in store.names()])
    return JSONResponse(AudioVoiceList(data=found, voices=found).model_dump())


@router.get(
    "/v1/audio/models",
    summary="List the model and its aliases",
    responses=model_response(AudioModelList, JSON) | error_responses(401, openai=True),
)
async def models(state: State, key: Reader) -> JSONResponse:
    found = AudioModelList(models=[AudioModel(id=name) for name in model_names(state.config)])
    return JSONResponse(found.model_dump())


@router.post(
    PATH,
    summary="Store a recording, or the speech of an earlier request, as a voice",
    responses=model_response(AudioVoice, JSON) | ERRORS,
    openapi_extra=NEW_VOICE,
)
async def create(http: Request, state: State, key: Caller) -> JSONResponse:
    store = state.lifecycle.require_engine().voices
    if media_type(http) == JSON:
        body = await read_model(http, SpeechAsVoice, state.config.limits, state.body_budget)
        name = body.name
        await store_speech(state, store, name, key, body.request_id)
    else:
        form = await read_form(http, state.config.limits, state.body_budget)
        check_parts(form, *FORM)
        fields = {part: text_part(form, part) for part in ("name", "type") if part in form}
        name, audio = validated(RecordingAsVoice, fields).name, file_part(form, "audio_sample")
        text = text_part(form, "text") if "text" in form else None
        await run_for_client(http, state, key, "voices", lambda: store_recordings(state, store, name, [(audio, text)]))
    return JSONResponse((await asyncio.to_thread(_voice, store, name)).model_dump())


VOICE_ERRORS = error_responses(400, 401, 404, 409, 429, 503, openai=True)


@router.get(PATH + "/{voice_id}", summary="Describe a voice", responses=model_response(AudioVoice, JSON) | VOICE_ERRORS)
async def retrieve(voice_id: str, state: State, key: Reader) -> JSONResponse:
    store = state.lifecycle.require_engine().voices
    return JSONResponse((await asyncio.to_thread(_voice, store, voice_id)).model_dump())


@router.delete(
    PATH + "/{voice_id}", summary="Delete a voice", responses=model_response(AudioVoiceDeleted, JSON) | VOICE_ERRORS
)
async def delete(voice_id: str, state: State, key: Caller) -> JSONResponse:
    await asyncio.to_thread(state.lifecycle.require_engine().voices.delete, voice_id)
    return JSONResponse(AudioVoiceDeleted(id=voice_id).model_dump())


def _voice(store: VoiceStore, name: str) -> AudioVoice:
    """Describe a stored voice. Blocks on file I/O. Raises VoiceNotFound, or InvalidRequest for an invalid name."""
    if not store.exists(name):
        raise VoiceNotFound(f"there is no voice {name!r}")
    details = None if store.is_builtin(name) else store.details(name)
    created = 0 if details is None else int(datetime.fromisoformat(details.created).timestamp())
    about = store.description(name)
    return AudioVoice(
        id=name,
        name=about.title or name,
        created_at=created,
        description=about.description,
        gender=about.gender,
        accent=about.accent,
    )
