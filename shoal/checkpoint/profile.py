"""How a model wants to be used: its usual sampling, and how its text is prepared."""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_type_hints

from shoal.checkpoint.layout import read_json
from shoal.errors import CheckpointError, InvalidRequest
from shoal.model.config import Family
from shoal.speech import SamplingParams

PROFILE_FILE = "shoal.json"
# A whole number will do for a fraction; True is no number, although Python says so.
TAKEN: dict[object, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,)}


@dataclass(frozen=True)
class ModelProfile:
    sampling: SamplingParams = field(default=SamplingParams())
    chunk_bytes: int = 600  # longest piece of text that is spoken in one turn
    carried_columns: int = 0  # longest prompt that keeps earlier turns; 0: as long as the model takes
    normalize: bool = False  # numbers, dates and symbols are spelled out first
    max_characters: int = 20_000
    voice: str | None = None  # of requests that choose none; None: whatever voice the model takes by itself


FAMILY_PROFILES: dict[Family, ModelProfile] = {
    "s1": ModelProfile(),
    # Upstream's server draws from the 30 likeliest, whatever the request says.
    "s2": ModelProfile(sampling=SamplingParams(top_k=30, repetition_penalty=1.0)),
}


def read_profile(directory: Path, family: Family) -> ModelProfile:
    """The profile in a model's directory; what it leaves out, or all of it, is the family's."""
    usual = FAMILY_PROFILES[family]
    path = directory / PROFILE_FILE
    if not path.is_file():
        return usual
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
        profile = replace(usual, sampling=replace(usual.sampling, **sampling), **stored)
        _check_bounds(profile)
    except (TypeError, InvalidRequest) as problem:
        raise CheckpointError(f"{path}: {problem}") from problem
    return profile


def _check_types(stored: dict[str, object], kind: type) -> None:
    """A dataclass takes anything, and what is wrong would fail in every request."""
    for name, expected in get_type_hints(kind).items():
        if name in stored and type(stored[name]) not in TAKEN.get(expected, (str, NoneType)):
            raise InvalidRequest(f"{name} cannot be {stored[name]!r}")


def _check_bounds(profile: ModelProfile) -> None:
    if not 16 <= profile.chunk_bytes <= 100_000:
        raise InvalidRequest(f"chunk_bytes must lie between 16 and 100000, not {profile.chunk_bytes}")
    if profile.carried_columns < 0 or profile.max_characters < 1:
        raise InvalidRequest("carried_columns must be at least 0 and max_characters at least 1")


def profile_document(profile: ModelProfile) -> dict[str, Any]:
    return asdict(profile)
