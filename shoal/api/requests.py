"""Wishes of a body -> the nouns of the engine. Shared by all APIs, so that a field means the same everywhere."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from shoal.api.config import Limits
from shoal.api.engine_client import Loaded
from shoal.api.exceptions import wrong_field
from shoal.errors import TextError
from shoal.speech import Recording, Sampling


class Drawing(Protocol):
    """The fields by which a body says how codes are drawn; None is as usual."""

    seed: int | None
    temperature: float | None
    top_p: float | None
    repetition_penalty: float | None
    max_new_tokens: int | None


def sampling_for(loaded: Loaded, body: Drawing) -> Sampling:
    """The model's usual sampling with what was asked for. Without a seed it is drawn, and told in `X-Seed`."""
    wishes = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "repetition_penalty": body.repetition_penalty,
        "max_frames": body.max_new_tokens,
    }
    given = {name: value for name, value in wishes.items() if value is not None}
    drawn = secrets.randbits(63) if body.seed is None else body.seed
    return replace(loaded.service.default_sampling, seed=drawn, **given)  # type: ignore[arg-type]


def check_length(text: str, limits: Limits) -> str:
    """The cheap check, before anybody looks into the text."""
    if len(text) > limits.text_characters:
        raise TextError(f"Text is too long, max length is {limits.text_characters}")
    return text


def recordings_of(pairs: Sequence[tuple[bytes, str]], limits: Limits) -> tuple[Recording, ...]:
    if len(pairs) > limits.references:
        raise wrong_field("references", f"give at most {limits.references} recordings")
    return tuple(Recording(audio, text) for audio, text in pairs)
