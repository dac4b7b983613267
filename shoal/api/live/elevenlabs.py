"""Messages of ElevenLabs' WebSockets, `stream-input` and `multi-stream-input`, and the options of their query."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AliasChoices, Field

from shoal.api.bodies.elevenlabs import (
    DEFAULT_OUTPUT,
    NO_EFFECT,
    OUTPUTS,
    AudioDelivery,
    VoiceSettings,
    wants_low_latency,
    with_speed,
)
from shoal.api.bodies.parsing import parse_json, validated
from shoal.api.bodies.schemas import Body
from shoal.api.exceptions import wrong_field
from shoal.api.live.events import MAX_EVENT_BYTES, TextBuffer
from shoal.api.output import OutputOptions
from shoal.errors import InvalidRequest
from shoal.speech import Sampling, SpeechRequest

DEFAULT_MIN_CHARACTERS = 120  # ElevenLabs' default for text that is buffered before the first audio
MAX_SEED = 2**32 - 1


class GenerationConfig(Body):
    chunk_length_schedule: Annotated[list[float] | None, Field(max_length=16)] = None


class StreamMessage(Body):
    """One message from the client. The first of a context may carry its settings."""

    text: str | None = None
    flush: bool | None = None
    context_id: Annotated[
        str | None, Field(max_length=255, validation_alias=AliasChoices("context_id", "contextId"))
    ] = None
    close_context: bool | None = None
    close_socket: bool | None = None
    voice_settings: VoiceSettings | None = None
    generation_config: Annotated[
        GenerationConfig | None, Field(validation_alias=AliasChoices("generation_config", "generator_config"))
    ] = None
    try_trigger_generation: Annotated[bool | None, Field(description=NO_EFFECT)] = None
    pronunciation_dictionary_locators: Annotated[
        list[dict[str, Any]] | None, Field(max_length=16, description=NO_EFFECT)
    ] = None
    # The key was checked in the handshake; clients that repeat it here are served.
    xi_api_key: Annotated[str | None, Field(validation_alias=AliasChoices("xi_api_key", "xi-api-key"))] = None
    authorization: str | None = None

    def ignored(self) -> list[str]:
        """Return the names of the settings that are given and have no effect."""
        settings = self.voice_settings.ignored() if self.voice_settings else []
        return [*settings, *(["pronunciation_dictionary_locators"] if self.pronunciation_dictionary_locators else [])]

    def min_characters(self) -> int:
        """Return the minimum number of characters to buffer before a sentence is spoken."""
        schedule = self.generation_config.chunk_length_schedule if self.generation_config else None
        return round(min(500.0, max(0.0, schedule[0]))) if schedule else DEFAULT_MIN_CHARACTERS


class LiveDialogueLine(Body):
    text: str
    voice_id: Annotated[str, Field(min_length=1, max_length=255)]


class DialogueMessage(Body):
    """One message from the client of the dialogue socket."""

    context_id: Annotated[str | None, Field(max_length=255)] = None
    voices: Annotated[list[str] | None, Field(max_length=16)] = None
    inputs: Annotated[list[LiveDialogueLine] | None, Field(max_length=200)] = None
    flush: bool | None = None
    close_context: bool | None = None
    close_socket: bool | None = None
    keep_alive: Annotated[bool | None, Field(description=NO_EFFECT)] = None
    voice_settings: Annotated[dict[str, Any] | None, Field(max_length=16, description=NO_EFFECT)] = None
    pronunciation_dictionary_locators: Annotated[
        list[dict[str, Any]] | None, Field(max_length=16, description=NO_EFFECT)
    ] = None
    xi_api_key: Annotated[str | None, Field(validation_alias=AliasChoices("xi_api_key", "xi-api-key"))] = None
    authorization: str | None = None

    def voice(self) -> str | None:
        """Return the voice that the message names, if any. Raises InvalidRequest for several."""
        names = {*(self.voices or ()), *(line.voice_id for line in self.inputs or ())}
        if len(names) > 1:
            raise InvalidRequest("a context of this socket has one voice: send dialogues by POST /v1/text-to-dialogue")
        return next(iter(names), None)

    def as_stream_message(self) -> StreamMessage:
        return StreamMessage(
            text=None if self.inputs is None else "".join(line.text for line in self.inputs),
            flush=self.flush,
            context_id=self.context_id,
            close_context=self.close_context,
            close_socket=self.close_socket,
        )


def parse_dialogue_message(message: str) -> DialogueMessage:
    """Parse one message. Raises InvalidRequest or a subclass."""
    _check_size(message)
    return validated(DialogueMessage, parse_json(message))


def _check_size(message: str) -> None:
    if len(message) > MAX_EVENT_BYTES:
        raise InvalidRequest(f"a message has at most {MAX_EVENT_BYTES:,} characters: send a longer text in parts")


def parse_message(message: str) -> StreamMessage:
    """Parse one message. Raises InvalidRequest or a subclass."""
    _check_size(message)
    return validated(StreamMessage, parse_json(message))


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options in the query of the handshake, for all contexts of a socket."""

    delivery: AudioDelivery
    auto_mode: bool  # speak every message at once, without waiting for the end of a sentence
    normalize: bool
    seed: int | None
    sync_alignment: bool  # character times count from the start of the context, not from the previous message

    def request(self, voice: str | None, seed: int, frame_rate: float, timeout: float) -> SpeechRequest:
        """Return the request of a context, without text."""
        return SpeechRequest(
            "",
            voice=voice,
            sampling=Sampling(seed=seed if self.seed is None else self.seed),
            normalize=self.normalize,
            timeout=timeout,
            first_chunk_frames=self.delivery.first_chunk_frames(frame_rate),
        )

    def buffer(self, first: StreamMessage) -> TextBuffer:
        return TextBuffer(first.min_characters(), None)

    def output_of(self, first: StreamMessage) -> OutputOptions:
        return with_speed(self.delivery.output, first.voice_settings)


def stream_options(query: Mapping[str, str]) -> StreamOptions:
    """Parse the query. Unknown parameters are ignored, as ElevenLabs does. Raises SchemaViolation."""
    format = query.get("output_format", DEFAULT_OUTPUT)
    if format not in OUTPUTS:
        raise wrong_field("output_format", f"use one of {', '.join(OUTPUTS)}")
    return StreamOptions(
        AudioDelivery(OUTPUTS[format], whole=False, low_latency=wants_low_latency(query)),
        auto_mode=query.get("auto_mode", "").lower() == "true",
        normalize=query.get("apply_text_normalization") != "off",
        seed=_seed(query.get("seed")),
        sync_alignment=query.get("sync_alignment", "").lower() == "true",
    )


def _seed(value: str | None) -> int | None:
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 10 or int(value) > MAX_SEED:
        raise wrong_field("seed", f"must be a whole number from 0 to {MAX_SEED}")
    return int(value)
