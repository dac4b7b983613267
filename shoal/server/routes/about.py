"""`GET /v1/about`: what a client wants to know before it offers choices: the model, its voices, its habits, limits."""

import asyncio

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from shoal import __version__
from shoal.audio.formats import FORMATS
from shoal.server.openapi import answers, returns
from shoal.server.parsing import JSON
from shoal.server.state import AtDesk, Caller, bearer
from shoal.speech import SamplingParams
from shoal.voices.store import VoiceStore

router = APIRouter(tags=["Voices"], dependencies=[Depends(bearer)])


class KnownVoice(BaseModel):
    name: str
    builtin: bool  # came with the model: it can be neither renamed nor deleted
    usual: bool  # of requests that choose none


class UsualSampling(BaseModel):
    """In the words of `/v1/tts`."""

    temperature: float
    top_p: float
    repetition_penalty: float
    max_new_tokens: int


class About(BaseModel):
    version: str
    model: str
    sample_rate: int
    frame_rate: float
    voices: list[KnownVoice]
    sampling: UsualSampling
    formats: list[str]
    text_characters: int


@router.get(
    "/v1/about",
    summary="The model, its voices, its usual sampling, the limits",
    responses=returns(About, JSON) | answers(401, 503),
)
async def about(desk: AtDesk, key: Caller) -> JSONResponse:
    loaded = desk.host.engine()
    told = About(
        version=__version__,
        model=desk.config.model,
        sample_rate=loaded.service.sample_rate,
        frame_rate=loaded.frame_rate,
        voices=await asyncio.to_thread(known_voices, loaded.voices, loaded.service.default_voice),
        sampling=usual(loaded.service.default_sampling),
        formats=list(FORMATS),
        text_characters=desk.config.limits.text_characters,
    )
    return JSONResponse(told.model_dump())


def known_voices(store: VoiceStore, usual: str | None) -> list[KnownVoice]:
    return [KnownVoice(name=name, builtin=store.is_builtin(name), usual=name == usual) for name in store.names()]


def usual(sampling: SamplingParams) -> UsualSampling:
    return UsualSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        max_new_tokens=sampling.max_frames,
    )
