"""Manifest of the clips to judge."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Clip:
    path: Path
    text: str
    voice: str
    system: str

    @property
    def pair(self) -> tuple[str, str]:
        return self.voice, self.text


def read_manifest(manifest: Path) -> list[Clip]:
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequest(f"{manifest}: {error.strerror}") from error
    clips = [_clip(line, f"{manifest}:{n}", manifest.parent) for n, line in enumerate(lines, 1) if line.strip()]
    if not clips:
        raise InvalidRequest(f"{manifest}: no clips")
    return clips


def _clip(line: str, where: str, folder: Path) -> Clip:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where}: {error}") from error
    if not isinstance(row, dict) or set(row) != {"path", "text", "voice", "system"}:
        raise InvalidRequest(f"{where}: needs exactly path, text, voice and system")
    if not all(isinstance(value, str) and value for value in row.values()):
        raise InvalidRequest(f"{where}: every field is a string that is not empty")
    return Clip(folder / row["path"], row["text"], row["voice"], row["system"])


def first_sentences(clips: Sequence[Clip], limit: int) -> list[Clip]:
    """Return the clips of the first `limit` sentences in all voices and systems, so that pairs stay complete."""
    kept = set(list(dict.fromkeys(clip.text for clip in clips))[:limit])
    return [clip for clip in clips if clip.text in kept]
