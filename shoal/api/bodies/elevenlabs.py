"""ElevenLabs' API: request bodies, output formats and their translation to speech jobs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from shoal.api.bodies.schemas import (
    FIRST_CHUNK_SECONDS,
    MAX_SPEAKERS,
    Body,
    SamplingExtensions,
    Seed,
)
from shoal.api.config import ServerConfig
from shoal.api.engine_client import EngineHandle
from shoal.api.exceptions import wrong_field
from shoal.api.keys import Key
from shoal.api.output import OutputOptions
from shoal.api.requests import SpeechJob, check_length, fallback_voices, model_names, sampling_for
from shoal.speech import SpeechRequest

RATES = (8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
MP3_RATES = ((22_050, 32), (24_000, 48), (44_100, 32), (44_100, 64), (44_100, 96), (44_100, 128), (44_100, 192))
DEFAULT_OUTPUT = "mp3_44100_128"
# Output formats by ElevenLabs' names: codec, sample rate in Hz, bitrate in kbit/s.
OUTPUTS = {
    DEFAULT_OUTPUT: OutputOptions("mp3", 44_100, 128_000),
    "mp3_44100": OutputOptions("mp3", 44_100, 128_000),
    **{f"mp3_{rate}_{kbits}": OutputOptions("mp3", rate, kbits * 1000) for rate, kbits in MP3_RATES},
    **{f"pcm_{rate}": OutputOptions("pcm", rate) for rate in RATES},
    **{f"wav_{rate}": OutputOptions("wav", rate) for rate in RATES},
    **{f"opus_48000_{kbits}": OutputOptions("opus", 48_000, kbits * 1000) for kbits in (32, 64, 96, 128, 192)},
    "ulaw_8000": OutputOptions("ulaw", 8_000),
    "alaw_8000": OutputOptions("alaw", 8_000),
}

Share = Annotated[float, Field(ge=0, le=1)]
NO_EFFECT = "Accepted without effect; named in the X-Ignored-Fields header."


class VoiceSettings(Body):
    """Voice settings of a request. Only `speed` has an effect: the other settings have no counterpart here."""

    stability: Annotated[Share | None, Field(description=NO_EFFECT)] = None
    similarity_boost: Annotated[Share | None, Field(description=NO_EFFECT)] = None
    style: Annotated[Share | None, Field(description=NO_EFFECT)] = None
    use_speaker_boost: Annotated[bool | None, Field(description=NO_EFFECT)] = None
    clone_strength: Annotated[Share | None, Field(description=NO_EFFECT)] = None
    speed: Annotated[float | None, Field(ge=0.25, le=4.0, description="Speaking rate; the pitch does not change.")] = (
        None
    )

    def ignored(self) -> list[str]:
        """Return the names of the settings that are given and have no effect."""
        return [f"voice_settings.{name}" for name in self.model_dump(exclude_none=True, exclude={"speed"})]


class ElevenLabsFields(SamplingExtensions):
    """Fields that the bodies of speech and of dialogues share."""

    model_id: Annotated[
        str | None,
        Field(max_length=255, description="Any name is accepted and selects the loaded model, which /v1/models lists."),
    ] = None
    language_code: Annotated[str | None, Field(max_length=64, description=NO_EFFECT)] = None
    seed: Annotated[
        Seed | None, Field(description="Sampling seed. Default: random, returned in the X-Seed header.")
    ] = None
    apply_text_normalization: Annotated[
        Literal["auto", "on", "off"] | None,
        Field(description="off passes the text to the model as written; auto and on normalise numbers and symbols."),
    ] = None
    pronunciation_dictionary_locators: Annotated[
        list[dict[str, Any]] | None, Field(max_length=16, description=NO_EFFECT)
    ] = None
    previous_text: Annotated[str | None, Field(description=NO_EFFECT)] = None
    previous_request_ids: Annotated[list[str] | None, Field(max_length=16, description=NO_EFFECT)] = None
    next_request_ids: Annotated[list[str] | None, Field(max_length=16, description=NO_EFFECT)] = None
    use_pvc_as_ivc: Annotated[bool | None, Field(description=NO_EFFECT)] = None
    audio_effects: Annotated[dict[str, Any] | None, Field(max_length=16, description=NO_EFFECT)] = None

    def ignored(self, config: ServerConfig) -> tuple[str, ...]:
        """Return the names of the fields that are given and have no effect on this server."""
        fields = type(self).model_fields.items()
        names = [name for name, field in fields if field.description == NO_EFFECT and getattr(self, name)]
        foreign = self.model_id and self.model_id not in model_names(config)
        return (*names, *(["model_id"] if foreign else []))


class ElevenLabsSpeech(ElevenLabsFields):
    """Body of `POST /v1/text-to-speech/{voice_id}` and the routes below it."""

    text: Annotated[str, Field(min_length=1, description="Text to speak.", examples=["Hello there."])]
    voice_settings: Annotated[VoiceSettings | None, Field(description="Settings of the voice.")] = None
    next_text: Annotated[str | None, Field(description=NO_EFFECT)] = None
    apply_language_text_normalization: Annotated[bool | None, Field(description=NO_EFFECT)] = None

    def ignored(self, config: ServerConfig) -> tuple[str, ...]:
        return (*super().ignored(config), *(self.voice_settings.ignored() if self.voice_settings else ()))


class DialogueLine(Body):
    text: Annotated[str, Field(min_length=1, description="Text to speak.")]
    voice_id: Annotated[str, Field(min_length=1, max_length=255, description="Name of a stored voice.")]


class ElevenLabsDialogue(ElevenLabsFields):
    """Body of `POST /v1/text-to-dialogue` and `/v1/text-to-dialogue/stream`."""

    inputs: Annotated[list[DialogueLine], Field(min_length=1, max_length=200, description="Lines in their order.")]
    settings: Annotated[dict[str, Any] | None, Field(max_length=16, description=NO_EFFECT)] = None
    future_text: Annotated[str | None, Field(description=NO_EFFECT)] = None

    def voices(self) -> tuple[str, ...]:
        """Return the voices in the order of their first lines. Raises SchemaViolation for too many."""
        found = tuple(dict.fromkeys(line.voice_id for line in self.inputs))
        if len(found) > MAX_SPEAKERS:
            raise wrong_field("inputs", f"use at most {MAX_SPEAKERS} voices, not {len(found)}")
        return found

    def text(self) -> str:
        """Return all lines, with the tag of its speaker before each line if there are several."""
        voices = self.voices()
        if len(voices) == 1:
            return " ".join(line.text for line in self.inputs)
        return "".join(f"<|speaker:{voices.index(line.voice_id)}|>{line.text}" for line in self.inputs)


@dataclass(frozen=True, slots=True)
class AudioDelivery:
    """Delivery of the audio of a request."""

    output: OutputOptions
    whole: bool  # one file instead of a stream
    low_latency: bool = False  # begin a stream with the first frames, at the risk of playback stalls

    def first_chunk_frames(self, frame_rate: float) -> int | None:
        """Return the frames of the first chunk, which players start with: it has to bridge network jitter."""
        return None if self.whole or self.low_latency else round(FIRST_CHUNK_SECONDS["balanced"] * frame_rate)


def elevenlabs_job(
    body: ElevenLabsSpeech,
    voice_id: str,
    delivery: AudioDelivery,
    engine: EngineHandle,
    config: ServerConfig,
    key: Key,
    id: str,
) -> SpeechJob:
    """Return the job of a speech body. Raises InvalidRequest or a subclass if it cannot be served."""
    request = replace(
        elevenlabs_request(body, body.text, delivery, engine, config),
        voice=voice_id,
        fallback_voices=fallback_voices(voice_id, engine),
    )
    output = with_speed(delivery.output, body.voice_settings)
    return SpeechJob("elevenlabs", request, output, engine, key, id, ignored=body.ignored(config))


def dialogue_job(
    body: ElevenLabsDialogue, delivery: AudioDelivery, engine: EngineHandle, config: ServerConfig, key: Key, id: str
) -> SpeechJob:
    """Return the job of a dialogue body. Raises InvalidRequest or a subclass if it cannot be served."""
    names = body.voices()
    request = replace(
        elevenlabs_request(body, body.text(), delivery, engine, config),
        voice=names[0] if len(names) == 1 else None,
        fallback_voices=fallback_voices(names[0], engine) if len(names) == 1 else (),
        voices=names if len(names) > 1 else (),
    )
    return SpeechJob("elevenlabs", request, delivery.output, engine, key, id, ignored=body.ignored(config))


def elevenlabs_request(
    body: ElevenLabsFields, text: str, delivery: AudioDelivery, engine: EngineHandle, config: ServerConfig
) -> SpeechRequest:
    """Return the request without its voice. Raises TextError for a text over the limit."""
    return SpeechRequest(
        check_length(text, config.limits),
        sampling=sampling_for(body),
        normalize=body.apply_text_normalization != "off",
        timeout=config.limits.request_seconds,
        whole=delivery.whole,
        first_chunk_frames=delivery.first_chunk_frames(engine.frame_rate),
    )


def with_speed(output: OutputOptions, settings: VoiceSettings | None) -> OutputOptions:
    return replace(output, speed=settings.speed) if settings and settings.speed else output


def wants_low_latency(query: Mapping[str, str]) -> bool:
    """Return whether `optimize_streaming_latency` asks for the earliest audio."""
    return query.get("optimize_streaming_latency") in ("3", "4")
