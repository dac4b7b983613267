"""The body of `POST /v1/tts`, as fish-speech's server and Fish Audio's clients send it."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from shoal.api.exceptions import wrong_field
from shoal.api.fields import (
    AudioBytes,
    Body,
    MaxFrames,
    RepetitionPenalty,
    SampleRate,
    Seed,
    Temperature,
    TopP,
    VoiceName,
    Whole,
)
from shoal.api.output import Rendering
from shoal.server.parsing import Form, parse_json, text_of

Format = Literal["wav", "pcm", "mp3", "opus", "flac", "aac", "webm"]
AUTO_BITRATE = -1000


def _no_other(conditioned: bool) -> bool:
    """A choice of one word would not read the texts of a form."""
    if not conditioned:
        raise ValueError("turns always hear the turns before them; leave it out")
    return conditioned


class ReferenceRecording(Body):
    audio: AudioBytes
    text: Annotated[str, Field(min_length=1, description="What is said in the recording.")]


class Prosody(Body):
    speed: Annotated[float, Field(ge=0.5, le=2.0, description="At the same pitch.")] = 1.0
    volume: Annotated[float, Field(ge=-20.0, le=20.0, description="Decibels.")] = 0.0


class SpeechBody(Body):
    """Every field is done as described, or refused by name."""

    text: Annotated[str, Field(min_length=1, examples=["Hello there."])]
    chunk_length: Annotated[
        Whole | None, Field(ge=16, le=1000, description="Most bytes of text per turn; without it, the model's usual.")
    ] = None
    format: Format = "wav"
    sample_rate: Annotated[SampleRate | None, Field(description="Without it, the model's own.")] = None
    mp3_bitrate: Annotated[Literal[64, 128, 192], Field(description="kbit/s, for mp3.")] = 128
    opus_bitrate: Annotated[
        Literal[-1000, 24, 32, 48, 64], Field(description="kbit/s, for opus and webm; -1000 is automatic.")
    ] = -1000
    references: Annotated[
        list[ReferenceRecording], Field(default_factory=list, description="Used when reference_id is null.")
    ]
    reference_id: Annotated[VoiceName | None, Field(description="A voice of /v1/references/list.")] = None
    seed: Annotated[Seed | None, Field(description="Without it one is drawn and told in X-Seed.")] = None
    use_memory_cache: Annotated[
        Literal["on", "off"],
        Field(description="Encoded references are remembered by their content in any case; the audio is the same."),
    ] = "off"
    normalize: Annotated[
        bool, Field(description="Prepare numbers and symbols as the model needs; false: speak the text as written.")
    ] = True
    latency: Annotated[
        Literal["normal", "balanced"],
        Field(description="balanced: stream; normal: all at once, unless `streaming` says otherwise."),
    ] = "normal"
    streaming: Annotated[bool | None, Field(description="Goes before `latency`.")] = None
    max_new_tokens: Annotated[MaxFrames | None, Field(description="Most frames per turn; 0: what fits.")] = None
    top_p: TopP | None = None
    temperature: Temperature | None = None
    repetition_penalty: Annotated[RepetitionPenalty | None, Field(description="S1 family only, as upstream.")] = None
    prosody: Prosody | None = None
    min_chunk_length: Annotated[
        Whole, Field(ge=0, le=1000, description="Live socket: fewest characters spoken before a flush.")
    ] = 50
    condition_on_previous_chunks: Annotated[
        bool,
        AfterValidator(_no_other),
        Field(
            description="Turns always hear the turns before them; false is refused.", json_schema_extra={"const": True}
        ),
    ] = True
    early_stop_threshold: Annotated[
        float, Field(ge=1.0, le=1.0, description="Generation ends when the model says so; only 1.0 is taken.")
    ] = 1.0

    @field_validator("mp3_bitrate", "opus_bitrate", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """Forms have only texts, and a choice of numbers does not read them."""
        return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value

    @property
    def streams(self) -> bool:
        return self.latency == "balanced" if self.streaming is None else self.streaming

    def rendering(self) -> Rendering:
        """Raises InvalidRequest when the format cannot carry the rate."""
        prosody = self.prosody or Prosody()
        return Rendering(self.format, self.sample_rate, self._bitrate(), prosody.speed, prosody.volume)

    def _bitrate(self) -> int | None:
        if self.format == "mp3":
            return self.mp3_bitrate * 1000
        if self.format in ("opus", "webm") and self.opus_bitrate != AUTO_BITRATE:
            return self.opus_bitrate * 1000
        return None


def form_content(form: Form) -> dict[str, Any]:
    """A form as the same fields. Recordings come as files `reference_audio`, each with a `reference_text`."""
    audios, texts = form.pop("reference_audio", []), form.pop("reference_text", [])
    if len(audios) != len(texts):
        raise wrong_field("reference_text", f"{len(audios)} recordings have {len(texts)} texts")
    content: dict[str, Any] = {name: text_of(form, name) for name in form}
    for name in ("references", "prosody"):
        if name in content:
            content[name] = parse_json(content[name])
    if audios:
        content["references"] = [{"audio": audio, "text": text} for audio, text in zip(audios, texts, strict=True)]
    return content
