"""Defaults of a model (`shoal.json`): sampling, text preparation and voice."""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_type_hints

from shoal.checkpoint.layout import read_json
from shoal.errors import CheckpointError, InvalidRequest
from shoal.model.family import Family
from shoal.speech import SamplingParams

PROFILE_FILE = "shoal.json"
# JSON types accepted per field type: an integer may stand for a float, but a boolean is not a number.
ACCEPTED_TYPES: dict[object, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,)}


@dataclass(frozen=True)
class ModelProfile:
    """Defaults of requests to a model."""

    sampling: SamplingParams = field(default=SamplingParams())
    chunk_bytes: int = 600  # longest turn in bytes of UTF-8
    carried_columns: int = 0  # longest prompt, in tokens, that carries earlier turns; 0: the model's maximum
    normalize: bool = False  # whether numbers, dates and symbols are spelled out first
    max_characters: int = 20_000
    sentence_turns: bool = False  # one sentence per turn; for models that leave out short ones inside a longer turn
    min_duration: float = 0.25  # shortest accepted turn, as a fraction of the time to read it at an ordinary rate
    hold_seconds: float = 0.0  # streams: audio of a turn that is held back, so that a turn that ends in it is retried
    clones: bool = True  # whether the model speaks with the voice of a recording; nano speaks with its built-in ones
    voice: str | None = None  # voice of requests that name none; None: the model chooses one


def default_profile(family: Family) -> ModelProfile:
    """Return the profile of models that store none."""
    return ModelProfile(sampling=family.sampling)


def read_profile(directory: Path, family: Family) -> ModelProfile:
    """Read a model's profile; absent fields, or all of them, are the family's. Raises CheckpointError."""
    default = default_profile(family)
    path = directory / PROFILE_FILE
    if not path.is_file():
        return default
    stored = read_json(path)
    unknown = sorted(set(stored) - {entry.name for entry in fields(ModelProfile)})
    if unknown:
        raise CheckpointError(f"{path}: unknown keys {', '.join(unknown)}")
    try:
        sampling = stored.pop("sampling", {})
        if not isinstance(sampling, dict):
            raise InvalidRequest("sampling must be an object")
        _check_types(sampling, SamplingParams)
        _check_types(stored, ModelProfile)
        profile = replace(default, sampling=replace(default.sampling, **sampling), **stored)
        _check_bounds(profile)
    except (TypeError, InvalidRequest) as problem:
        raise CheckpointError(f"{path}: {problem}") from problem
    return profile


def _check_types(stored: dict[str, object], dataclass_type: type) -> None:
    """Raise InvalidRequest for a value of the wrong type, which would otherwise fail in every request."""
    for name, expected in get_type_hints(dataclass_type).items():
        if name in stored and type(stored[name]) not in ACCEPTED_TYPES.get(expected, (str, NoneType)):
            raise InvalidRequest(f"{name} cannot be {stored[name]!r}")


def _check_bounds(profile: ModelProfile) -> None:
    if not 16 <= profile.chunk_bytes <= 100_000:
        raise InvalidRequest(f"chunk_bytes must be between 16 and 100000, not {profile.chunk_bytes}")
    if profile.carried_columns < 0 or profile.max_characters < 1:
        raise InvalidRequest("carried_columns must be at least 0 and max_characters at least 1")
    if not (0 <= profile.min_duration <= 1 and 0 <= profile.hold_seconds <= 10):
        raise InvalidRequest("min_duration must be between 0 and 1 and hold_seconds between 0 and 10")


def profile_document(profile: ModelProfile) -> dict[str, Any]:
    """Return the JSON document that `read_profile` reads."""
    return asdict(profile)
