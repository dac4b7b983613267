"""ElevenLabs' `/v1/voices`, `/v2/voices` and `/v1/models`: list, describe, store and delete voices."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from shoal.api.bodies.parsing import JSON, Form, check_parts, parse_json, text_part, validated
from shoal.api.bodies.schemas import VOICE_NAME, Body, VoiceName
from shoal.api.config import ServerConfig
from shoal.api.exceptions import wrong_field
from shoal.api.state import ServerState
from shoal.api.voices.upload import store_recordings
from shoal.errors import VoiceNotFound
from shoal.server.openapi import error_responses, form_body, model_response
from shoal.server.request_body import read_form
from shoal.server.state import Caller, State, bearer
from shoal.server.streaming_response import run_for_client
from shoal.voices.description import GENDERS, VoiceDescription
from shoal.voices.store import VoiceStore

ERRORS = error_responses(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504, elevenlabs=True)

router = APIRouter(tags=["ElevenLabs"], dependencies=[Depends(bearer)])
# Used under the prefix /compat/elevenlabs only. Without it, OpenAI's `/v1/models` route answers both APIs' clients.
models_router = APIRouter(tags=["ElevenLabs"], dependencies=[Depends(bearer)])


class ElevenLabsVoice(BaseModel):
    voice_id: str
    name: str
    category: str  # premade: built in; cloned: stored
    labels: dict[str, str] = {}
    description: str | None = None
    preview_url: str | None = None


class ElevenLabsNewVoice(Body):
    name: VoiceName


class ElevenLabsVoiceAdded(BaseModel):
    voice_id: str
    requires_verification: bool = False


class ElevenLabsStatus(BaseModel):
    status: str = "ok"


IGNORED_PART = {"type": "string", "description": "Accepted without effect."}
FORM: dict[str, Any] = {
    "name": {"type": "string", "pattern": VOICE_NAME, "maxLength": 255},
    "files": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}},
    "text": {"type": "string", "minLength": 1, "description": "Extension: transcript, if there is one recording."},
    "description": {"type": "string", "maxLength": 500, "description": "Description of the voice."},
    "labels": {"type": "string", "description": "JSON object; `gender` and `accent` are kept."},
    "remove_background_noise": IGNORED_PART,
}
NEW_VOICE = form_body(FORM, required=("name", "files"))


class ElevenLabsVoices(BaseModel):
    voices: list[ElevenLabsVoice]


class ElevenLabsVoicePage(ElevenLabsVoices):
    """All voices on one page."""

    has_more: bool = False
    total_count: int
    next_page_token: str | None = None


class VoiceQuery(BaseModel):
    """Query of the paged list. Parameters that select nothing here, such as `page_size`, are ignored."""

    search: Annotated[str, Field(description="Text in the id, name, description, category or labels.")] = ""
    voice_ids: Annotated[list[str], Field(description="Ids of the voices to list; default: all.")] = []
    category: Annotated[str | None, Field(description="premade or cloned.")] = None
    gender: str | None = None
    accent: str | None = None

    def selects(self, voice: ElevenLabsVoice) -> bool:
        labels = voice.labels
        words = (voice.voice_id, voice.name, voice.description or "", voice.category, *labels.values())
        wanted = (
            (self.category, voice.category),
            (self.gender, labels.get("gender")),
            (self.accent, labels.get("accent")),
        )
        return (
            any(self.search.lower() in word.lower() for word in words)
            and (not self.voice_ids or voice.voice_id in self.voice_ids)
            and all(value is None or value.lower() == (label or "").lower() for value, label in wanted)
        )


VOICE_ERRORS = error_responses(400, 401, 404, 503, elevenlabs=True)


@router.get("/v1/voices", summary="List the voices", responses=model_response(ElevenLabsVoices, JSON) | VOICE_ERRORS)
async def voices(state: State, key: Caller) -> JSONResponse:
    return JSONResponse(ElevenLabsVoices(voices=await _voices(state)).model_dump())


@router.get("/v2/voices", summary="Find voices", responses=model_response(ElevenLabsVoicePage, JSON) | VOICE_ERRORS)
async def voice_page(state: State, key: Caller, query: Annotated[VoiceQuery, Query()]) -> JSONResponse:
    found = [voice for voice in await _voices(state) if query.selects(voice)]
    return JSONResponse(ElevenLabsVoicePage(voices=found, total_count=len(found)).model_dump())


@router.get(
    "/v1/voices/{voice_id}", summary="Describe a voice", responses=model_response(ElevenLabsVoice, JSON) | VOICE_ERRORS
)
async def voice(voice_id: str, state: State, key: Caller) -> JSONResponse:
    store = state.lifecycle.require_engine().voices
    return JSONResponse((await asyncio.to_thread(_describe, store, voice_id)).model_dump())


@router.post(
    "/v1/voices/add",
    summary="Store recordings as a voice",
    responses=model_response(ElevenLabsVoiceAdded, JSON) | ERRORS,
    openapi_extra=NEW_VOICE,
)
async def add_voice(http: Request, state: State, key: Caller) -> JSONResponse:
    store = state.lifecycle.require_engine().voices
    form = await read_form(http, state.config.limits, state.body_budget)
    check_parts(form, *FORM)
    name = validated(ElevenLabsNewVoice, {"name": text_part(form, "name")}).name
    files = [part for part in form.get("files", []) if isinstance(part, bytes)]
    if not 0 < len(files) <= state.config.limits.references:
        raise wrong_field("files", f"send 1 to {state.config.limits.references} recordings under this name")
    text = text_part(form, "text") if "text" in form and len(files) == 1 else None
    clips = [(file, text) for file in files]
    about = description_of_form(form)
    await run_for_client(http, state, key, "voices", lambda: store_recordings(state, store, name, clips, about))
    return JSONResponse(ElevenLabsVoiceAdded(voice_id=name).model_dump())


@router.delete(
    "/v1/voices/{voice_id}",
    summary="Delete a voice",
    responses=model_response(ElevenLabsStatus, JSON) | error_responses(400, 401, 404, 409, 429, 503, elevenlabs=True),
)
async def delete_voice(voice_id: str, state: State, key: Caller) -> JSONResponse:
    await asyncio.to_thread(state.lifecycle.require_engine().voices.delete, voice_id)
    return JSONResponse(ElevenLabsStatus().model_dump())


def description_of_form(form: Form) -> VoiceDescription:
    """Return the description and the labels of a new voice. Raises SchemaViolation for labels that are not JSON."""
    words = " ".join(text_part(form, "description").split()) if "description" in form else ""
    labels = read_labels(text_part(form, "labels")) if "labels" in form else {}
    gender = labels.get("gender", "").lower()
    return VoiceDescription(
        description=words, gender=gender if gender in GENDERS else "", accent=labels.get("accent", "")
    )


def read_labels(text: str) -> dict[str, str]:
    labels = parse_json(text.encode() or b"{}")
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise wrong_field("labels", "send a JSON object of texts")
    return labels


async def _voices(state: ServerState) -> list[ElevenLabsVoice]:
    store = state.lifecycle.require_engine().voices
    return await asyncio.to_thread(lambda: [_describe(store, name) for name in store.names()])


def _describe(store: VoiceStore, name: str) -> ElevenLabsVoice:
    """Describe a stored voice. Blocks on file I/O. Raises VoiceNotFound, or InvalidRequest for an invalid name."""
    if not store.exists(name):
        raise VoiceNotFound(f"there is no voice {name!r}")
    about = store.description(name)
    return ElevenLabsVoice(
        voice_id=name,
        name=about.title or name,
        category="premade" if store.is_builtin(name) else "cloned",
        labels={label: value for label, value in (("gender", about.gender), ("accent", about.accent)) if value},
        description=about.description or None,
    )


@models_router.get("/v1/models", summary="List the model")
async def models(state: State, key: Caller) -> JSONResponse:
    return model_list(state.config)


def model_list(config: ServerConfig) -> JSONResponse:
    """Return the loaded model in ElevenLabs' format, a plain array."""
    longest = config.limits.text_characters
    model = {
        "model_id": config.model,
        "name": config.model,
        "can_do_text_to_speech": True,
        "can_do_voice_conversion": False,
        "can_be_finetuned": False,
        "can_use_style": False,
        "can_use_speaker_boost": False,
        "maximum_text_length_per_request": longest,
        "max_characters_request_free_user": longest,
        "max_characters_request_subscribed_user": longest,
        "languages": [],
    }
    return JSONResponse([model])
