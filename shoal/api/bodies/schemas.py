"""Request bodies of the Fish and the OpenAI API, as their published clients send them."""

import base64
import binascii
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    RootModel,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from shoal.api.bodies.parsing import Form, parse_json, text_part
from shoal.api.exceptions import wrong_field
from shoal.api.output import OutputOptions
from shoal.audio.formats import OPUS_BITRATES

Format = Literal["wav", "pcm", "mp3", "opus", "flac", "aac", "webm", "ulaw", "alaw"]
AUTO_BITRATE = -1000
OPUS_KILOBITS = (AUTO_BITRATE, 24, 32, 48, 64)  # values of Fish Audio's older clients
# Seconds of audio in the first chunk, by `latency`. Playback that started with 90 ms crackled on real networks.
FIRST_CHUNK_SECONDS = {"balanced": 0.46, "normal": 0.93}
KNOWN_FEATURES = ("quality-guard",)  # always on: output that is not speech is generated again
PCM_RATE = 24_000  # Hz; OpenAI's clients assume it, since pcm has no header


class Body(BaseModel):
    """Base of all bodies: unknown fields and wrong types are rejected, never ignored or converted.

    A null is a field that is not set, even an unknown one: clients in C#, Java and JavaScript (MessagePack) send it.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if value is not None}


def _integral(value: Any) -> Any:
    """Convert integral floats: JSON does not distinguish 200.0 from 200, and some clients send the former."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _decode_audio(value: Any) -> Any:
    """Decode base64 strings, pass bytes through. URLs are rejected and never fetched."""
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("send the audio itself as base64; URLs and paths are not fetched") from None


Integer = Annotated[int, BeforeValidator(_integral)]
AudioBytes = Annotated[
    bytes,
    BeforeValidator(_decode_audio),
    Field(min_length=1),
    PlainSerializer(lambda audio: base64.b64encode(audio).decode(), return_type=str),
    WithJsonSchema(
        {"type": "string", "format": "byte", "minLength": 4, "description": "Audio file; base64-encoded in JSON."}
    ),
]
Seed = Annotated[Integer, Field(ge=0, le=2**63 - 1)]
VOICE_NAME = r"^[a-zA-Z0-9\-_]([a-zA-Z0-9\-_ ]*[a-zA-Z0-9\-_])?$"
MAX_NAME = 255
VoiceName = Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=VOICE_NAME)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.9, le=2)]
TopK = Annotated[Integer, Field(ge=0, le=100_000)]
MaxFrames = Annotated[Integer, Field(ge=0, le=100_000)]
SampleRate = Annotated[Integer, Field(ge=8_000, le=192_000)]
Normalize = Annotated[
    bool | Literal["en", "de", "fr"],
    Field(
        description="true: read markup, and spell out what the model cannot read; false: pass the text unchanged; "
        "a language: also spell out numbers and symbols in that language, for multilingual models."
    ),
]
Ssml = Annotated[bool | None, Field(description="Whether the text is SSML. Default: if it begins with `<speak>`.")]
RequestLexicon = Annotated[
    dict[str, str],
    Field(
        default_factory=dict,
        max_length=100,
        description="Readings of words: a respelling, or phonemes in slashes (`/JH IH1 F/`, Arpabet or IPA).",
    ),
]
ShowText = Annotated[
    bool, Field(description="Return the text as the model reads it, percent-encoded, in the X-Spoken-Text header.")
]


MAX_SPEAKERS = 16


class ReferenceRecording(Body):
    audio: AudioBytes
    text: Annotated[str, Field(min_length=1, description="Transcript of the recording.")]
    speaker: Annotated[
        Integer | None,
        Field(ge=0, lt=MAX_SPEAKERS, description="Speaker of a dialogue, from 0. Default: one speaker per recording."),
    ] = None


def _flatten(references: Any) -> Any:
    """Number the speakers of nested recordings, one list per speaker: [[a, b], [c]] -> a and b of 0, c of 1."""
    if not (isinstance(references, list) and references and all(isinstance(each, list) for each in references)):
        return references
    if len(references) > MAX_SPEAKERS or not all(references):
        raise ValueError(f"give each of at most {MAX_SPEAKERS} speakers a recording; {len(references)} lists were sent")
    return [
        {**recording, "speaker": speaker} if isinstance(recording, dict) else recording
        for speaker, recordings in enumerate(references)
        for recording in recordings
    ]


def _check_names(voices: str | list[str] | None) -> str | list[str] | None:
    names = [voices] if isinstance(voices, str) else voices or []
    if isinstance(voices, list) and not 1 <= len(names) <= MAX_SPEAKERS:
        raise ValueError(f"send 1 to {MAX_SPEAKERS} voices, one for each speaker, not {len(names)}")
    for name in names:
        if len(name) > MAX_NAME or not re.fullmatch(VOICE_NAME, name):
            raise ValueError(f"{name[:64]!r} is not a voice's name: use up to {MAX_NAME} letters, digits, - and _")
    return voices


NAME_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_NAME, "pattern": VOICE_NAME}
VoiceNames = Annotated[
    str | list[str] | None,
    AfterValidator(_check_names),
    WithJsonSchema(
        {"anyOf": [NAME_SCHEMA, {"type": "array", "items": NAME_SCHEMA, "maxItems": MAX_SPEAKERS}, {"type": "null"}]}
    ),
]


class Prosody(Body):
    speed: Annotated[float, Field(ge=0.5, le=2.0, description="Speaking rate; the pitch does not change.")] = 1.0
    volume: Annotated[float, Field(ge=-20.0, le=20.0, description="Gain in decibels.")] = 0.0
    normalize_loudness: Annotated[
        bool | None, Field(description="Bring the speech to -16 LUFS (EBU R 128) before the gain of `volume`.")
    ] = None


def _check_opus_bitrate(bitrate: int) -> int:
    if bitrate in OPUS_KILOBITS or OPUS_BITRATES.min <= bitrate <= OPUS_BITRATES.max:
        return bitrate
    kilobits = ", ".join(map(str, OPUS_KILOBITS))
    raise ValueError(
        f"send {OPUS_BITRATES.min} to {OPUS_BITRATES.max} bits per second, or one of {kilobits} kilobits per second"
    )


class SpeechBody(Body):
    """Body of `POST /v1/tts`. Every field takes effect as described; fields that are not supported are rejected."""

    text: Annotated[str, Field(min_length=1, description="Text to speak.", examples=["Hello there."])]
    chunk_length: Annotated[
        Integer | None,
        Field(ge=16, le=1000, description="Maximum bytes of text per turn. Default: the model's."),
    ] = None
    format: Annotated[Format, Field(description="Audio format of the response.")] = "wav"
    sample_rate: Annotated[
        SampleRate | None, Field(description="Sample rate of the response in Hz. Default: the model's.")
    ] = None
    mp3_bitrate: Annotated[Literal[64, 128, 192], Field(description="Bitrate in kbit/s for mp3.")] = 128
    opus_bitrate: Annotated[
        Integer,
        AfterValidator(_check_opus_bitrate),
        Field(
            description="Bitrate of opus and webm in bit/s, or 24, 32, 48 or 64 kbit/s; -1000 is the encoder's choice.",
            json_schema_extra={
                "anyOf": [
                    {"enum": list(OPUS_KILOBITS)},
                    {"minimum": OPUS_BITRATES.min, "maximum": OPUS_BITRATES.max},
                ]
            },
        ),
    ] = AUTO_BITRATE
    references: Annotated[
        list[ReferenceRecording],
        Field(fail_fast=True),
        BeforeValidator(_flatten),
        Field(
            default_factory=list,
            description="Recordings of the voice to clone; ignored when reference_id is set. For a dialogue, a list of "
            "lists has the recordings of each speaker.",
        ),
    ]
    reference_id: Annotated[
        VoiceNames,
        Field(
            description="Name of a stored voice, as listed by /v1/references/list; a list has one for each speaker of "
            "a dialogue."
        ),
    ] = None
    seed: Annotated[
        Seed | None, Field(description="Sampling seed. Default: random, returned in the X-Seed header.")
    ] = None
    use_memory_cache: Annotated[
        Literal["on", "off"],
        Field(description="Accepted for compatibility: encoded references are always cached by content."),
    ] = "off"
    normalize: Normalize = True
    ssml: Ssml = None
    lexicon: RequestLexicon
    show_text: ShowText = False
    latency: Annotated[
        Literal["low", "balanced", "normal"] | None,
        Field(
            description="First chunk of a stream: low 1 or 2 frames, depending on the GPU, balanced 0.46 s, normal "
            "0.93 s. low and balanced stream, normal returns the audio whole; `streaming` takes precedence. "
            "Default: the complete file; in a stream the same as low."
        ),
    ] = None
    streaming: Annotated[
        bool | None, Field(description="Stream the audio as it is generated. Takes precedence over `latency`.")
    ] = None
    max_new_tokens: Annotated[
        MaxFrames | None, Field(description="Maximum frames per turn; 0: as many as the context holds.")
    ] = None
    top_p: Annotated[TopP | None, Field(description="Nucleus sampling threshold. Default: the model's.")] = None
    top_k: Annotated[
        TopK | None, Field(description="Sample from the K likeliest tokens; 0: all. Default: the model's.")
    ] = None
    temperature: Annotated[Temperature | None, Field(description="Sampling temperature. Default: the model's.")] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None, Field(description="Repetition penalty; the S2 family ignores it, as upstream.")
    ] = None
    prosody: Annotated[Prosody | None, Field(description="Speed and volume of the audio.")] = None
    min_chunk_length: Annotated[
        Integer,
        Field(ge=0, le=1000, description="Live socket only: minimum characters to buffer before a sentence is spoken."),
    ] = 50
    condition_on_previous_chunks: Annotated[
        bool, Field(description="Generate every turn, and live sentence, with the previous ones as context.")
    ] = True
    early_stop_threshold: Annotated[
        float, Field(ge=1.0, le=1.0, description="Only 1.0 is supported: generation ends at the model's end token.")
    ] = 1.0
    features: Annotated[
        list[Annotated[str, Field(max_length=64)]],
        Field(
            default_factory=list,
            max_length=16,
            description="Fish Audio's optional features. quality-guard is always on; others have no effect and are "
            "named in the X-Ignored-Fields header.",
        ),
    ]

    @field_validator("mp3_bitrate", mode="before")
    @classmethod
    def _parse_number(cls, value: Any) -> Any:
        """Convert the string of a form to a number, which a Literal of numbers does not do even in lax mode."""
        return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value

    @property
    def streams(self) -> bool:
        return self.latency in ("low", "balanced") if self.streaming is None else self.streaming

    def first_chunk_frames(self, frame_rate: float) -> int | None:
        """Return the frames of the first chunk that `latency` chooses; None: the engine's setting."""
        if self.latency in (None, "low"):
            return None
        return round(FIRST_CHUNK_SECONDS[self.latency] * frame_rate)

    def ignored(self) -> tuple[str, ...]:
        """Return the names of the requested features that have no effect."""
        return tuple(f"features.{_header_text(name)}" for name in self.features if name not in KNOWN_FEATURES)

    def output(self) -> OutputOptions:
        """Return the output options. Raises InvalidRequest when the format does not support the sample rate."""
        prosody = self.prosody or Prosody()
        return OutputOptions(
            self.format,
            self.sample_rate,
            self._bitrate(),
            prosody.speed,
            prosody.volume,
            normalize_loudness=bool(prosody.normalize_loudness),
        )

    def _bitrate(self) -> int | None:
        if self.format == "mp3":
            return self.mp3_bitrate * 1000
        if self.format in ("opus", "webm") and self.opus_bitrate != AUTO_BITRATE:
            return self.opus_bitrate * (1000 if self.opus_bitrate in OPUS_KILOBITS else 1)
        return None


def _header_text(name: str) -> str:
    """Return a name with every character that is not safe in an HTTP header replaced by a question mark."""
    return re.sub(r"[^A-Za-z0-9._-]", "?", name)


def form_fields(form: Form) -> dict[str, Any]:
    """Convert a form to the fields of SpeechBody. Recordings are `reference_audio` files, one `reference_text` each."""
    audios, texts = form.pop("reference_audio", []), form.pop("reference_text", [])
    if len(audios) != len(texts):
        raise wrong_field("reference_text", f"{len(audios)} recordings have {len(texts)} texts; send one text for each")
    content: dict[str, Any] = {name: text_part(form, name) for name in form}
    for name in ("references", "prosody", "features", "lexicon"):
        if name in content:
            content[name] = parse_json(content[name])
    if audios:
        content["references"] = [{"audio": audio, "text": text} for audio, text in zip(audios, texts, strict=True)]
    return content


class VoiceById(Body):
    id: VoiceName


class SamplingExtensions(Body):
    """Sampling fields that extend the OpenAI and ElevenLabs APIs."""

    temperature: Annotated[Temperature | None, Field(description="Extension: sampling temperature.")] = None
    top_p: Annotated[TopP | None, Field(description="Extension: nucleus sampling threshold.")] = None
    top_k: Annotated[TopK | None, Field(description="Extension: sample from the K likeliest tokens; 0: all.")] = None
    repetition_penalty: Annotated[RepetitionPenalty | None, Field(description="Extension: repetition penalty.")] = None
    max_new_tokens: Annotated[MaxFrames | None, Field(description="Extension: maximum frames per turn.")] = None


class OpenAISpeech(SamplingExtensions):
    """Body of `POST /v1/audio/speech`."""

    model: Annotated[str, Field(min_length=1, max_length=255, description="A name listed by /v1/models.")]
    input: Annotated[str, Field(min_length=1, description="Text to speak.")]
    voice: Annotated[
        VoiceName | VoiceById | Annotated[list[VoiceName], Field(min_length=1, max_length=MAX_SPEAKERS)],
        Field(
            description="Name of a stored voice, or an OpenAI voice name. Extension: a list of stored voices, one for "
            "each speaker of a dialogue."
        ),
    ]
    instructions: Annotated[
        str | None,
        Field(
            max_length=4_096,
            description="Speaking style. S2 models read it as a direction in brackets before the text; for other "
            "models the request is refused unless the server sets `ignore_instructions`.",
        ),
    ] = None
    response_format: Annotated[
        Literal["mp3", "opus", "aac", "flac", "wav", "pcm", "ulaw", "alaw"],
        Field(description="Audio format of the response. Extension: ulaw and alaw, G.711 at 8 kHz without a header."),
    ] = "mp3"
    speed: Annotated[float, Field(ge=0.25, le=4.0, description="Speaking rate; the pitch does not change.")] = 1.0
    stream_format: Annotated[
        Literal["audio", "sse"], Field(description="audio: raw bytes; sse: server-sent events with base64 audio.")
    ] = "audio"
    timestamps: Annotated[
        bool, Field(description="Extension, with stream_format sse: also send when each word is spoken.")
    ] = False
    sample_rate: Annotated[
        SampleRate | None,
        Field(description="Extension: sample rate in Hz. Default: 24000 for pcm, the model's for other formats."),
    ] = None
    seed: Annotated[
        Seed | None, Field(description="Extension: sampling seed. Default: random, returned in the X-Seed header.")
    ] = None
    normalize: Normalize = True
    ssml: Ssml = None
    lexicon: RequestLexicon
    show_text: ShowText = False

    @field_validator("voice", mode="before")
    @classmethod
    def _readable_voice_error(cls, voice: Any) -> Any:
        """Check a name before the union does: its errors name types of pydantic."""
        if isinstance(voice, str) and not (len(voice) <= MAX_NAME and re.fullmatch(VOICE_NAME, voice)):
            raise ValueError("a voice name has letters from a to z, digits, '-', '_' and spaces between them")
        if not isinstance(voice, str | dict | list):
            raise ValueError("send the name of a voice")
        return voice

    @model_validator(mode="after")
    def _timestamps_need_events(self) -> "OpenAISpeech":
        if self.timestamps and self.stream_format != "sse":
            raise ValueError("timestamps are sent as events: set stream_format to sse")
        return self

    def output(self) -> OutputOptions:
        rate = self.sample_rate or (PCM_RATE if self.response_format == "pcm" else None)
        return OutputOptions(self.response_format, rate, speed=self.speed)


class Invocation(RootModel[dict[str, Any]]):
    """Body of SageMaker's `/invocations`: a Fish body (`text`) or an OpenAI body (`input`)."""

    @model_validator(mode="after")
    def _one_of_two(self) -> "Invocation":
        if "input" in self.root and "text" in self.root:
            raise ValueError("send `text` (Fish) or `input` (OpenAI), not both")
        return self
