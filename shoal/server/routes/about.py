"""`GET /v1/about`: the model, its voices, defaults and limits, for clients with a user interface."""

import asyncio

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from shoal import __version__
from shoal.api.bodies.parsing import JSON
from shoal.api.voices.known import KnownVoice, known_voices
from shoal.audio.formats import FORMATS
from shoal.server.openapi import error_responses, model_response
from shoal.server.state import Caller, State, bearer
from shoal.speech import SamplingParams

router = APIRouter(tags=["Voices"], dependencies=[Depends(bearer)])


class DefaultSampling(BaseModel):
    """The model's default sampling, with the field names of `/v1/tts`."""

    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    max_new_tokens: int


class About(BaseModel):
    version: str
    model: str
    sample_rate: int
    frame_rate: float
    voices: list[KnownVoice]
    clones: bool  # whether the model speaks with the voice of a recording
    word_times: bool  # whether requests may ask for timestamps
    reference_seconds: float  # maximum duration of a voice recording
    sampling: DefaultSampling
    formats: list[str]
    text_characters: int


@router.get(
    "/v1/about",
    summary="Describe the model, its voices, its default sampling and the limits",
    responses=model_response(About, JSON) | error_responses(401, 503),
)
async def about(state: State, key: Caller) -> JSONResponse:
    engine = state.lifecycle.require_engine()
    content = About(
        version=__version__,
        model=state.config.model,
        sample_rate=engine.service.sample_rate,
        frame_rate=engine.frame_rate,
        voices=await asyncio.to_thread(known_voices, engine),
        clones=engine.clones,
        word_times=engine.word_times,
        reference_seconds=state.config.limits.reference_seconds,
        sampling=default_sampling(engine.service.default_sampling),
        formats=list(FORMATS),
        text_characters=state.config.limits.text_characters,
    )
    return JSONResponse(content.model_dump(mode="json"))


def default_sampling(sampling: SamplingParams) -> DefaultSampling:
    return DefaultSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        max_new_tokens=sampling.max_frames,
    )
