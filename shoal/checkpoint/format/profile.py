"""Defaults of a model (`shoal.json`): sampling, text preparation and voice."""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_type_hints

from shoal.checkpoint.format.layout import read_json
from shoal.errors import CheckpointError, InvalidRequest
from shoal.model.family import Family
from shoal.speech import SamplingParams

PROFILE_FILE = "shoal.json"
# Names of fields in files written by earlier versions.
FORMER_NAMES = {"carried_columns": "context_tokens"}
# JSON types accepted per field type: an integer may stand for a float, but a boolean is not a number.
ACCEPTED_TYPES: dict[object, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,)}


@dataclass(frozen=True)
class Alignment:
    """Attention heads that follow the text while the model speaks it, for word times.

    `shoal align calibrate` finds them. If it finds none, `heads` is empty and `quality` is the best that was reached.
    """

    heads: tuple[tuple[int, int], ...] = ()  # (layer, head)
    quality: float = 0.0  # share of attention on the word that is spoken, times the share of words that were found
    lead_frames: float = 1.0  # frames by which attention precedes the sound

    def __post_init__(self) -> None:
        if len(set(self.heads)) != len(self.heads) or list(self.heads) != sorted(self.heads):
            raise InvalidRequest("alignment heads must be different and in ascending order")
        if not (0 <= self.quality <= 1 and -10 <= self.lead_frames <= 10):
            raise InvalidRequest("alignment quality must be between 0 and 1 and lead_frames between -10 and 10")


@dataclass(frozen=True)
class ModelProfile:
    """Defaults of requests to a model."""

    sampling: SamplingParams = field(default=SamplingParams())
    chunk_bytes: int = 600  # longest turn in bytes of UTF-8
    context_tokens: int = 0  # longest prompt, in tokens, that may contain earlier turns; 0: the model's maximum
    normalize: bool = False  # numbers, dates and symbols are spelled out first
    max_characters: int = 20_000
    sentence_turns: bool = False  # one sentence per turn; for models that leave out short ones inside a longer turn
    min_duration: float = 0.25  # shortest accepted turn, as a fraction of the time to read it at an ordinary rate
    hold_seconds: float = 0.0  # seconds of a streamed turn that are held back: a turn that ends within them is retried
    clones: bool = True  # the model speaks with the voice of a recording
    voice: str | None = None  # voice of requests that name none; None: the model chooses one
    alignment: Alignment | None = None  # None: `shoal align calibrate` has not been run


def default_profile(family: Family) -> ModelProfile:
    """Return the profile of models that store none."""
    return ModelProfile(sampling=family.sampling)


def read_profile(directory: Path, family: Family) -> ModelProfile:
    """Read a model's profile; absent fields, or all of them, are the family's. Raises CheckpointError."""
    default = default_profile(family)
    path = directory / PROFILE_FILE
    if not path.is_file():
        return default
    stored = {FORMER_NAMES.get(name, name): value for name, value in read_json(path).items()}
    unknown = sorted(set(stored) - {entry.name for entry in fields(ModelProfile)})
    if unknown:
        raise CheckpointError(f"{path}: unknown keys {', '.join(unknown)}")
    try:
        sampling = stored.pop("sampling", {})
        if not isinstance(sampling, dict):
            raise InvalidRequest("sampling must be an object")
        alignment = read_alignment(stored.pop("alignment", None))
        _check_types(sampling, SamplingParams)
        _check_types(stored, ModelProfile)
        profile = replace(default, sampling=replace(default.sampling, **sampling), alignment=alignment, **stored)
        _check_bounds(profile)
    except (TypeError, InvalidRequest) as problem:
        raise CheckpointError(f"{path}: {problem}") from problem
    return profile


def read_alignment(stored: object) -> Alignment | None:
    """Return the alignment of a JSON value. Raises InvalidRequest."""
    if stored is None:
        return None
    if not isinstance(stored, dict) or not isinstance(stored.get("heads"), list):
        raise InvalidRequest("alignment must be an object with a list of heads")
    heads = stored["heads"]
    for head in heads:
        if not (isinstance(head, list) and len(head) == 2 and all(type(each) is int and each >= 0 for each in head)):
            raise InvalidRequest(f"alignment heads must be pairs of layer and head, not {head!r:.40}")
    numbers = {name: value for name, value in stored.items() if name != "heads"}
    _check_types(numbers, Alignment)
    return Alignment(tuple((layer, head) for layer, head in heads), **numbers)


def _check_types(stored: dict[str, object], dataclass_type: type) -> None:
    """Raise InvalidRequest for a value of the wrong type, which would otherwise fail in every request."""
    for name, expected in get_type_hints(dataclass_type).items():
        if name in stored and type(stored[name]) not in ACCEPTED_TYPES.get(expected, (str, NoneType)):
            raise InvalidRequest(f"{name} cannot be {stored[name]!r}")


def _check_bounds(profile: ModelProfile) -> None:
    if not 16 <= profile.chunk_bytes <= 100_000:
        raise InvalidRequest(f"chunk_bytes must be between 16 and 100000, not {profile.chunk_bytes}")
    if profile.context_tokens < 0 or profile.max_characters < 1:
        raise InvalidRequest("context_tokens must be at least 0 and max_characters at least 1")
    if not (0 <= profile.min_duration <= 1 and 0 <= profile.hold_seconds <= 10):
        raise InvalidRequest("min_duration must be between 0 and 1 and hold_seconds between 0 and 10")


def profile_document(profile: ModelProfile) -> dict[str, Any]:
    """Return the JSON document that `read_profile` reads."""
    return asdict(profile)
