"""Kinds of fields that several bodies share."""

import base64
import binascii
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema


class Body(BaseModel):
    """Nothing is guessed and nothing is ignored: unknown fields and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _whole(value: Any) -> Any:
    """JSON does not tell 200.0 from 200, and neither do the clients of some languages."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _audio(value: Any) -> Any:
    """Bytes as they are, or their base64. Anything else, such as an address, is refused and never fetched."""
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("send the audio itself as base64; addresses and paths are not fetched") from None


Whole = Annotated[int, BeforeValidator(_whole)]
AudioBytes = Annotated[
    bytes,
    BeforeValidator(_audio),
    Field(min_length=1),
    PlainSerializer(lambda audio: base64.b64encode(audio).decode(), return_type=str),
    WithJsonSchema({"type": "string", "format": "byte", "minLength": 4, "description": "Audio file, base64 in JSON."}),
]
Seed = Annotated[Whole, Field(ge=0, le=2**63 - 1)]
VOICE_NAME = r"^[a-zA-Z0-9\-_]([a-zA-Z0-9\-_ ]*[a-zA-Z0-9\-_])?$"
VoiceName = Annotated[str, Field(min_length=1, max_length=255, pattern=VOICE_NAME)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.9, le=2)]
MaxFrames = Annotated[Whole, Field(ge=0, le=100_000)]
SampleRate = Annotated[Whole, Field(ge=8_000, le=192_000)]
