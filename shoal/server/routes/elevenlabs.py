"""ElevenLabs' API: `POST /v1/text-to-speech/{voice_id}` and the routes below it, `/v1/voices` and `/v2/voices`.

A voice id is the name of a stored voice. Alignment has the text as it was written; it is null if the model has no
known alignment heads. The times of a word are divided evenly over its characters.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from shoal.api.bodies.elevenlabs import (
    DEFAULT_OUTPUT,
    OUTPUTS,
    AudioDelivery,
    ElevenLabsDialogue,
    ElevenLabsSpeech,
    dialogue_job,
    elevenlabs_job,
    wants_low_latency,
)
from shoal.api.bodies.parsing import JSON, Form, check_parts, parse_json, text_part, validated
from shoal.api.bodies.schemas import VOICE_NAME, Body, VoiceName
from shoal.api.config import ServerConfig
from shoal.api.exceptions import SchemaViolation, wrong_field
from shoal.api.keys import Key
from shoal.api.output import OutputOptions
from shoal.api.speech_stream import SpeechStream
from shoal.api.state import ServerState
from shoal.api.voices.upload import store_recordings
from shoal.api.word_events import CharacterTimes
from shoal.errors import VoiceNotFound
from shoal.server.middleware.request_id import request_id
from shoal.server.openapi import audio_response, error_responses, form_body, model_response, request_body
from shoal.server.request_body import read_form, read_model
from shoal.server.state import Caller, State, bearer
from shoal.server.streaming_response import Transform, respond, run_for_client
from shoal.speech import Word
from shoal.voices.description import GENDERS, VoiceDescription
from shoal.voices.store import VoiceStore

SPEECH, DIALOGUE = "/v1/text-to-speech/{voice_id}", "/v1/text-to-dialogue"
JSON_LINES = "application/x-ndjson"
ERRORS = error_responses(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504, elevenlabs=True)
EXAMPLES = {"plain": {"value": {"text": "Hello there."}}}
BODY = request_body(ElevenLabsSpeech, (JSON,), EXAMPLES)
DIALOGUE_BODY = request_body(ElevenLabsDialogue, (JSON,))

router = APIRouter(tags=["ElevenLabs"], dependencies=[Depends(bearer)])
models_router = APIRouter(tags=["ElevenLabs"], dependencies=[Depends(bearer)])


class CharacterAlignment(BaseModel):
    """Times of characters in seconds."""

    characters: list[str]
    character_start_times_seconds: list[float]
    character_end_times_seconds: list[float]


class TimedAudio(BaseModel):
    """Encoded audio with its alignment; null without new words. Both alignments are those of the text as written."""

    audio_base64: str
    alignment: CharacterAlignment | None = None
    normalized_alignment: CharacterAlignment | None = None


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
    "description": {"type": "string", "maxLength": 500, "description": "Words about the voice."},
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


OutputParameter = Annotated[
    str,
    Query(
        description="Audio format of the response: codec, sample rate in Hz, bitrate in kbit/s.",
        json_schema_extra={"enum": list(OUTPUTS)},
    ),
]


async def get_output(output_format: OutputParameter = DEFAULT_OUTPUT) -> OutputOptions:
    """Return the options of ElevenLabs' `output_format`."""
    if output_format not in OUTPUTS:
        message = f"use one of {', '.join(OUTPUTS)}"
        raise SchemaViolation([{"type": "enum", "loc": ["query", "output_format"], "msg": message}])
    return OUTPUTS[output_format]


Output = Annotated[OutputOptions, Depends(get_output)]


@router.post(
    SPEECH,
    summary="Generate speech as a whole file",
    response_class=Response,
    responses=audio_response() | ERRORS,
    openapi_extra=BODY,
)
async def convert(voice_id: str, http: Request, state: State, key: Caller, output: Output) -> Response:
    return await _speak(http, state, key, voice_id, output, whole=True)


@router.post(
    SPEECH + "/stream",
    summary="Generate speech as a stream",
    response_class=Response,
    responses=audio_response() | ERRORS,
    openapi_extra=BODY,
)
async def stream(voice_id: str, http: Request, state: State, key: Caller, output: Output) -> Response:
    return await _speak(http, state, key, voice_id, output, whole=False)


@router.post(
    SPEECH + "/with-timestamps",
    summary="Generate speech as a whole file in JSON",
    responses=model_response(TimedAudio, JSON) | ERRORS,
    openapi_extra=BODY,
)
async def convert_with_timestamps(
    voice_id: str, http: Request, state: State, key: Caller, output: Output
) -> JSONResponse:
    words: list[Word] = []
    audio = await _speak(http, state, key, voice_id, output, whole=True, timed=True, words=words)
    kept = {name: value for name, value in audio.headers.items() if name not in ("content-length", "content-type")}
    return JSONResponse(_timed_audio(bytes(audio.body), words), headers=kept)


@router.post(
    SPEECH + "/stream/with-timestamps",
    summary="Generate speech as a stream of JSON lines",
    response_class=Response,
    responses=model_response(TimedAudio, JSON_LINES) | ERRORS,
    openapi_extra=BODY,
)
async def stream_with_timestamps(voice_id: str, http: Request, state: State, key: Caller, output: Output) -> Response:
    return await _speak(http, state, key, voice_id, output, whole=False, timed=True)


@router.post(
    DIALOGUE,
    summary="Generate a dialogue as a whole file",
    response_class=Response,
    responses=audio_response() | ERRORS,
    openapi_extra=DIALOGUE_BODY,
)
async def dialogue(http: Request, state: State, key: Caller, output: Output) -> Response:
    return await _speak_dialogue(http, state, key, output, whole=True)


@router.post(
    DIALOGUE + "/stream",
    summary="Generate a dialogue as a stream",
    response_class=Response,
    responses=audio_response() | ERRORS,
    openapi_extra=DIALOGUE_BODY,
)
async def stream_dialogue(http: Request, state: State, key: Caller, output: Output) -> Response:
    return await _speak_dialogue(http, state, key, output, whole=False)


async def _speak_dialogue(
    http: Request, state: ServerState, key: Key, output: OutputOptions, *, whole: bool
) -> Response:
    engine = state.lifecycle.require_engine()
    body = await read_model(http, ElevenLabsDialogue, state.config.limits, state.body_budget)
    delivery = AudioDelivery(output, whole, wants_low_latency(http.query_params))
    job = dialogue_job(body, delivery, engine, state.config, key, request_id(http))
    return _with_id(await respond(http, state, job), job.id)


async def _speak(
    http: Request,
    state: ServerState,
    key: Key,
    voice_id: str,
    output: OutputOptions,
    *,
    whole: bool,
    timed: bool = False,
    words: list[Word] | None = None,
) -> Response:
    """Respond with audio, or if `timed` and streamed with JSON lines. `words` receives those of a whole response."""
    engine = state.lifecycle.require_engine()
    body = await read_model(http, ElevenLabsSpeech, state.config.limits, state.body_budget)
    delivery = AudioDelivery(output, whole, wants_low_latency(http.query_params))
    job = elevenlabs_job(body, voice_id, delivery, engine, state.config, key, request_id(http))
    job = replace(job, request=replace(job.request, timestamps=timed and engine.word_times))
    if timed and not whole:
        return _with_id(await respond(http, state, job, media_type=JSON_LINES, transform=_json_lines), job.id)
    return _with_id(await respond(http, state, job, words=words), job.id)


def _with_id(response: Response, id: str) -> Response:
    response.headers["request-id"] = id  # the name under which ElevenLabs' clients look for it
    return response


def _json_lines(stream: SpeechStream) -> Transform:
    async def lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            yield json.dumps(_timed_audio(piece, stream.take_words())).encode() + b"\n"
        if words := stream.take_words():
            yield json.dumps(_timed_audio(b"", words)).encode() + b"\n"

    return lines


def _timed_audio(audio: bytes, words: Sequence[Word]) -> dict[str, Any]:
    alignment = CharacterAlignment(**CharacterTimes.of(words).as_seconds()) if words else None
    encoded = base64.b64encode(audio).decode()
    return TimedAudio(audio_base64=encoded, alignment=alignment, normalized_alignment=alignment).model_dump()


VOICE_ERRORS = error_responses(400, 401, 404, 503, elevenlabs=True)


@router.get("/v1/voices", summary="List the voices", responses=model_response(ElevenLabsVoices, JSON) | VOICE_ERRORS)
async def voices(state: State, key: Caller) -> JSONResponse:
    return JSONResponse(ElevenLabsVoices(voices=await _voices(state)).model_dump())


@router.get("/v2/voices", summary="List the voices", responses=model_response(ElevenLabsVoicePage, JSON) | VOICE_ERRORS)
async def voice_page(state: State, key: Caller) -> JSONResponse:
    found = await _voices(state)
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
    form = await read_form(http, state.config.limits, state.body_budget)
    check_parts(form, *FORM)
    name = validated(ElevenLabsNewVoice, {"name": text_part(form, "name")}).name
    files = [part for part in form.get("files", []) if isinstance(part, bytes)]
    if not 0 < len(files) <= state.config.limits.references:
        raise wrong_field("files", f"send 1 to {state.config.limits.references} recordings under this name")
    text = text_part(form, "text") if "text" in form and len(files) == 1 else None
    clips = [(file, text) for file in files]
    about = description_of_form(form)
    await run_for_client(http, state, key, "voices", lambda: store_recordings(state, name, clips, about))
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
    """Return the loaded model in ElevenLabs' format; it has no list object, and other clients get OpenAI's."""
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
