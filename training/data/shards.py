"""Files of a shard: written atomically, read line by line."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a shard's `.jsonl`: the speaker, the text, and its place in the `.pcm` (both counted in samples)."""

    voice: str
    text: str
    offset: int
    samples: int


def shard_stem(out: Path, shard: int) -> Path:
    return out / f"shard-{shard:05d}"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: an interrupted process leaves no partial file under its name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def read_lines(path: Path) -> list[Line]:
    """Read a shard's lines. Fields besides those of Line, such as word times, are left out."""
    names = [entry.name for entry in fields(Line)]
    stored = map(json.loads, path.read_text().splitlines())
    return [Line(**{name: line[name] for name in names}) for line in stored]
