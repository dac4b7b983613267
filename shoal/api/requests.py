"""Turn validated bodies into jobs for the engine. A field means the same in every API."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol
from urllib.parse import quote
from xml.sax.saxutils import escape

from shoal.api.bodies.schemas import OpenAISpeech, ReferenceRecording, SpeechBody
from shoal.api.config import Limits, ServerConfig
from shoal.api.engine_client import EngineHandle
from shoal.api.exceptions import wrong_field
from shoal.api.keys import Key
from shoal.api.output import OutputOptions
from shoal.api.voices.openai import OPENAI_VOICES
from shoal.errors import ModelNotFound, TextError
from shoal.speech import Pronunciation, Recording, Sampling, SpeechRequest
from shoal.text.lexicon import pronunciation
from shoal.text.markup.ssml import is_ssml
from shoal.text.plan import TextPlan, plan_text
from shoal.text.tokenizer import SPEAKER_TAG

SPOKEN_TEXT_BYTES = 4_000  # limit of the X-Spoken-Text header; /v1/text returns a whole text

BRACKETS = str.maketrans("[]", "()")  # brackets inside a direction would end it


@dataclass(frozen=True, slots=True)
class SpeechJob:
    """A validated request with its engine, output format and key."""

    api: str  # label in metrics and logs
    request: SpeechRequest
    output: OutputOptions
    engine: EngineHandle
    key: Key
    id: str
    ignored: tuple[str, ...] = ()  # request fields that were accepted without effect
    show_text: bool = False  # return the text as the model reads it in a header
    prefix: int = 0  # characters at the start of the request's text that are not the client's

    def __post_init__(self) -> None:
        # Done here, so that a key's lexicon applies in every API.
        object.__setattr__(self, "request", with_key_lexicon(self.request, self.key))

    @property
    def stream(self) -> bool:
        return not self.request.whole


def fish_job(
    body: SpeechBody,
    engine: EngineHandle,
    limits: Limits,
    key: Key,
    id: str,
    *,
    api: str = "fish",
    ignored: tuple[str, ...] = (),
) -> SpeechJob:
    """Return the job of a Fish body. Raises InvalidRequest or a subclass if it cannot be served."""
    request = replace(fish_request(body, limits), first_chunk_frames=body.first_chunk_frames(engine.frame_rate))
    ignored = (*ignored, *body.ignored())
    return SpeechJob(api, request, body.output(), engine, key, id, ignored=ignored, show_text=body.show_text)


def fish_request(body: SpeechBody, limits: Limits) -> SpeechRequest:
    names = [body.reference_id] if isinstance(body.reference_id, str) else body.reference_id or []
    return SpeechRequest(
        check_length(body.text, limits),
        voice=names[0] if len(names) == 1 else None,
        voices=tuple(names) if len(names) > 1 else (),
        recordings=() if names else recordings(body.references, limits),
        sampling=sampling_for(body),
        chunk_bytes=body.chunk_length,
        normalize=body.normalize is not False,
        language=language_of(body),
        ssml=body.ssml,
        lexicon=request_lexicon(body),
        timeout=limits.request_seconds,
        whole=not body.streams,
        carry_turns=body.condition_on_previous_chunks,
    )


def openai_job(body: OpenAISpeech, engine: EngineHandle, config: ServerConfig, key: Key, id: str) -> SpeechJob:
    """Return the job of an OpenAI body. Raises ModelNotFound, InvalidRequest or a subclass if it cannot be served."""
    check_model(body.model, config)
    text, ignored = openai_text(body, engine, config)
    voice, voices = openai_voices(body)
    request = SpeechRequest(
        check_length(text, config.limits),
        voice=voice,
        fallback_voices=fallback_voices(voice, engine),
        voices=voices,
        sampling=sampling_for(body),
        normalize=body.normalize is not False,
        language=language_of(body),
        ssml=body.ssml,
        lexicon=request_lexicon(body),
        timeout=config.limits.request_seconds,
        timestamps=body.timestamps,
    )
    prefix, output = len(text) - len(body.input), body.output()
    return SpeechJob("openai", request, output, engine, key, id, ignored, show_text=body.show_text, prefix=prefix)


def openai_text(body: OpenAISpeech, engine: EngineHandle, config: ServerConfig) -> tuple[str, tuple[str, ...]]:
    """Return the text with its instructions, and the fields without effect. Raises SchemaViolation."""
    if not body.instructions or not body.instructions.strip():
        return body.input, ()
    if engine.text_rules.directions:
        return with_direction(body.input, body.instructions), ()
    if config.ignore_instructions:
        return body.input, ("instructions",)
    raise wrong_field(
        "instructions",
        "this model follows no instructions; leave them out, or start the server with ignore_instructions=true",
    )


def with_direction(text: str, direction: str) -> str:
    """Return the text with a direction in brackets before it, after the tag of the first speaker if it has one."""
    words = " ".join(direction.translate(BRACKETS).split())
    if is_ssml(text):
        start = text.index(">", text.index("<speak")) + 1
        return f"{text[:start]}{escape(f'[{words}]')} {text[start:]}"
    tag = SPEAKER_TAG.match(text)
    start = tag.end() if tag else 0
    return f"{text[:start]}[{words}] {text[start:]}"


def openai_voices(body: OpenAISpeech) -> tuple[str | None, tuple[str, ...]]:
    """Return (voice, ()) for one voice, or (None, voices) for a dialogue."""
    if isinstance(body.voice, list):
        return (body.voice[0], ()) if len(body.voice) == 1 else (None, tuple(body.voice))
    return body.voice if isinstance(body.voice, str) else body.voice.id, ()


def fallback_voices(name: str | None, engine: EngineHandle) -> tuple[str | None, ...]:
    """Return the fallback of an OpenAI voice name, for when no voice is stored under it; empty for other names.

    It is the built-in voice assigned to the name, else None, the model's default.
    """
    return (engine.openai_voices.get(name),) if name in OPENAI_VOICES else ()


class TextFields(Protocol):
    """Fields of speech bodies that say how the text is read."""

    normalize: bool | Literal["en", "de", "fr"]
    lexicon: dict[str, str]


def language_of(body: TextFields) -> str | None:
    return body.normalize if isinstance(body.normalize, str) else None


def request_lexicon(body: TextFields) -> tuple[Pronunciation, ...]:
    """Return the lexicon of a body. Raises SchemaViolation for an invalid entry, or a lexicon without `normalize`."""
    if body.lexicon and body.normalize is False:
        raise wrong_field("lexicon", "normalize: false passes the text unchanged; leave one of them out")
    try:
        return tuple(pronunciation(written, reading) for written, reading in body.lexicon.items())
    except TextError as problem:
        raise wrong_field("lexicon", str(problem)) from None


def with_key_lexicon(request: SpeechRequest, key: Key) -> SpeechRequest:
    """Return the request with the lexicon of its key, to which its own entries have precedence. Idempotent."""
    if not key.lexicon or not request.normalize or request.lexicon[: len(key.lexicon)] == key.lexicon:
        return request
    return replace(request, lexicon=(*key.lexicon, *request.lexicon))


def text_plan(request: SpeechRequest, engine: EngineHandle) -> TextPlan:
    """Return the text of a request as the model reads it. CPU-bound: run it in a thread. Raises TextError."""
    return plan_text(request, engine.text_rules, lexicon=engine.lexicon)


def spoken_text_header(request: SpeechRequest, engine: EngineHandle) -> str:
    """Return the text as the model reads it, percent-encoded UTF-8, cut to what clients accept in a header."""
    encoded = ""
    for word in re.findall(r"\s*\S+", text_plan(request, engine).text):
        if len(encoded) + len(part := quote(word)) > SPOKEN_TEXT_BYTES:
            return encoded + quote(" …")
        encoded += part
    return encoded


def response_headers(job: SpeechJob, config: ServerConfig) -> dict[str, str]:
    """Return the headers of an audio response: format, sample rate, model, seed and ignored fields."""
    assert job.request.sampling is not None
    headers = {"X-Ignored-Fields": ", ".join(job.ignored)} if job.ignored else {}
    return headers | {
        "Content-Disposition": f"attachment; filename=audio.{job.output.format}",
        "X-Sample-Rate": str(job.output.rate_for(job.engine.service.sample_rate)),
        "X-Channels": "1",
        "X-Model": config.model.encode("ascii", "replace").decode(),
        "X-Seed": str(job.request.sampling.seed),
    }


class SamplingFields(Protocol):
    """Sampling fields that all speech bodies have; None selects the model's default."""

    seed: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    repetition_penalty: float | None
    max_new_tokens: int | None


def sampling_for(body: SamplingFields) -> Sampling:
    """Return the sampling fields that the body gives, with a random seed if it has none. The engine adds defaults."""
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        repetition_penalty=body.repetition_penalty,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        max_frames=body.max_new_tokens,
    )


def check_length(text: str, limits: Limits) -> str:
    """Return the text. Raises TextError for one over the limit, before it is parsed."""
    if len(text) > limits.text_characters:
        raise TextError(f"Text is too long, max length is {limits.text_characters}")
    return text


def recordings(references: Sequence[ReferenceRecording], limits: Limits) -> tuple[Recording, ...]:
    """Return the recordings. Raises SchemaViolation for too many, and for speakers that are not numbered from 0."""
    if len(references) > limits.references:
        raise wrong_field("references", f"send at most {limits.references} recordings, not {len(references)}")
    speakers = {each.speaker for each in references} - {None}
    if speakers and (speakers != set(range(len(speakers))) or any(each.speaker is None for each in references)):
        raise wrong_field("references", "number the speakers from 0, and give every recording its speaker or none")
    return tuple(Recording(each.audio, each.text, each.speaker) for each in references)


def ignored_model(model: str | None, config: ServerConfig) -> tuple[str, ...]:
    """Return the ignored fields of a Fish client's `model` header: any name selects the loaded model."""
    return () if model is None or model == config.model else ("model",)


def check_model(model: str, config: ServerConfig) -> None:
    """Raise ModelNotFound when an OpenAI client asks for a model that is not loaded."""
    known = model_names(config)
    if model not in known:
        raise ModelNotFound(f"there is no model {model[:64]!r} here; use one of {', '.join(known)}")


def model_names(config: ServerConfig) -> tuple[str, ...]:
    """Return the loaded model's name and its aliases."""
    return (config.model, *config.model_aliases)
