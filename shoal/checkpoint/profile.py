"""How a model wants to be used: its usual sampling, and how its text is prepared."""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.layout import read_json
from shoal.errors import CheckpointError, InvalidRequest
from shoal.model.config import Family
from shoal.speech import Sampling

FILE = "shoal.json"


@dataclass(frozen=True)
class Profile:
    sampling: Sampling = field(default=Sampling())
    chunk_bytes: int = 600  # longest piece of text that is spoken in one turn
    carried_columns: int = 0  # longest prompt that keeps earlier turns; 0: as long as the model takes
    normalize: bool = False  # numbers, dates and symbols are spelled out first
    max_characters: int = 20_000
    voice: str | None = None  # of requests that choose none; None: whatever voice the model takes by itself


FAMILY_PROFILES: dict[Family, Profile] = {
    "s1": Profile(),
    # Upstream's server draws from the 30 likeliest, whatever the request says.
    "s2": Profile(sampling=Sampling(top_k=30, repetition_penalty=1.0)),
}


def read_profile(directory: Path, family: Family) -> Profile:
    """The profile in a model's directory; what it leaves out, or all of it, is the family's."""
    usual = FAMILY_PROFILES[family]
    path = directory / FILE
    if not path.is_file():
        return usual
    stored = read_json(path)
    unknown = sorted(set(stored) - {entry.name for entry in fields(Profile)})
    if unknown:
        raise CheckpointError(f"{path}: unknown keys {', '.join(unknown)}")
    try:
        sampling = replace(usual.sampling, **stored.pop("sampling", {}))
        return replace(usual, sampling=sampling, **stored)
    except (TypeError, InvalidRequest) as problem:
        raise CheckpointError(f"{path}: {problem}") from problem


def profile_document(profile: Profile) -> dict[str, Any]:
    return asdict(profile)
