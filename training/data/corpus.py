"""The corpus as training reads it, while it may still be growing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from training.data.shards import Line, read_lines
from training.data.sound import SAMPLE_RATE, Samples


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one utterance lies: its shard's mapped samples and its line."""

    pcm: Samples
    line: Line


class Corpus:
    """The complete shards of a folder; `refresh` adds those finished since. Indices never change meaning.

    `corpus[i]` is (int16 samples, text, voice); the samples are a read-only view into the mapped file.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.entries: list[Entry] = []
        self._seen: set[str] = set()
        self.refresh()

    def refresh(self) -> int:
        """Map newly completed shards; returns how many utterances were added."""
        before = len(self.entries)
        for path in sorted(self.folder.glob("shard-*.jsonl")):
            if path.name not in self._seen:
                self._seen.add(path.name)
                self.entries += self._map(path)
        return len(self.entries) - before

    @staticmethod
    def _map(path: Path) -> list[Entry]:
        lines = read_lines(path)
        if not lines:
            return []
        pcm: Samples = np.memmap(path.with_suffix(".pcm"), dtype="<i2", mode="r")
        return [Entry(pcm, line) for line in lines]

    @property
    def samples(self) -> int:
        return sum(entry.line.samples for entry in self.entries)

    @property
    def hours(self) -> float:
        return self.samples / SAMPLE_RATE / 3600

    @property
    def voices(self) -> list[str]:
        return [str(name) for name in json.loads((self.folder / "voices.json").read_text())]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[Samples, str, str]:
        entry = self.entries[index]
        line = entry.line
        return entry.pcm[line.offset : line.offset + line.samples], line.text, line.voice

    def __iter__(self) -> Iterator[tuple[Samples, str, str]]:
        return (self[index] for index in range(len(self)))

    def by_voice(self) -> dict[str, list[int]]:
        """Indices of each voice's utterances."""
        ranked = sorted(range(len(self)), key=lambda index: self.entries[index].line.voice)
        return {v: list(group) for v, group in groupby(ranked, key=lambda index: self.entries[index].line.voice)}
