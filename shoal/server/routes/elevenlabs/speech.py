"""ElevenLabs' `POST /v1/text-to-speech/{voice_id}`, the routes below it, and `/v1/text-to-dialogue`.

A voice id is the name of a stored voice. Alignment has the text as it was written; it is null if the model has no
known alignment heads. The times of a word are divided evenly over its characters.
"""

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
from shoal.api.bodies.parsing import JSON
from shoal.api.exceptions import SchemaViolation
from shoal.api.keys import Key
from shoal.api.output import OutputOptions
from shoal.api.speech_stream import SpeechStream
from shoal.api.state import ServerState
from shoal.api.word_events import CharacterTimes
from shoal.server.middleware.request_id import request_id
from shoal.server.openapi import audio_response, error_responses, model_response, request_body
from shoal.server.request_body import read_model
from shoal.server.state import Caller, State, bearer
from shoal.server.streaming_response import Transform, respond
from shoal.speech import Word

SPEECH, DIALOGUE = "/v1/text-to-speech/{voice_id}", "/v1/text-to-dialogue"
JSON_LINES = "application/x-ndjson"
ERRORS = error_responses(400, 401, 404, 408, 409, 413, 415, 422, 429, 501, 503, 504, elevenlabs=True)
EXAMPLES = {"plain": {"value": {"text": "Hello there."}}}
BODY = request_body(ElevenLabsSpeech, (JSON,), EXAMPLES)
DIALOGUE_BODY = request_body(ElevenLabsDialogue, (JSON,))

router = APIRouter(tags=["ElevenLabs"], dependencies=[Depends(bearer)])


class CharacterAlignment(BaseModel):
    """Times of characters in seconds."""

    characters: list[str]
    character_start_times_seconds: list[float]
    character_end_times_seconds: list[float]


class TimedAudio(BaseModel):
    """Encoded audio with its alignment, null without new words. Both alignments refer to the text as written."""

    audio_base64: str
    alignment: CharacterAlignment | None = None
    normalized_alignment: CharacterAlignment | None = None


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
    """Respond with audio, or with JSON lines if `timed` and streamed. `words` collects words of a whole response."""
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
