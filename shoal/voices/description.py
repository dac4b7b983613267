"""Descriptions of voices, shown in lists: `description.json` in the directory of a voice."""

import json
from dataclasses import asdict, dataclass, fields

from shoal.errors import InvalidRequest

GENDERS = ("", "female", "male", "neutral")
MAX_CHARACTERS = {"title": 80, "description": 500, "gender": 16, "accent": 60, "preview": 300}


@dataclass(frozen=True, slots=True)
class VoiceDescription:
    """Description of a voice. Every field may be empty; none affects the audio."""

    title: str = ""  # shown instead of the name
    description: str = ""  # character and use
    gender: str = ""  # one of GENDERS
    accent: str = ""
    preview: str = ""  # sentence that a preview of the voice speaks

    def __post_init__(self) -> None:
        """Raise InvalidRequest for a value that is not one line of printable text within its limit."""
        for field in fields(self):
            _check(field.name, getattr(self, field.name))
        if self.gender not in GENDERS:
            raise InvalidRequest(f"gender must be female, male, neutral or empty, not {self.gender!r}")

    def filled(self) -> dict[str, str]:
        """Return the fields that are not empty."""
        return {name: value for name, value in asdict(self).items() if value}


def read_description(content: bytes) -> VoiceDescription:
    """Parse description.json. Raises InvalidRequest."""
    try:
        stored = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}") from error
    if not isinstance(stored, dict):
        raise InvalidRequest("not a JSON object")
    unknown = sorted(set(stored) - set(MAX_CHARACTERS))
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0]!r}; the fields are {', '.join(MAX_CHARACTERS)}")
    return VoiceDescription(**stored)


def description_document(description: VoiceDescription) -> bytes:
    """Return the file that `read_description` reads."""
    return (json.dumps(description.filled(), indent=1, ensure_ascii=False) + "\n").encode()


def _check(name: str, value: object) -> None:
    limit = MAX_CHARACTERS[name]
    if not isinstance(value, str) or not value.isprintable() or len(value) > limit:
        raise InvalidRequest(f"{name} must be one line of text with at most {limit} characters")


NO_DESCRIPTION = VoiceDescription()
