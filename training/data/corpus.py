"""Read the shards of a folder, also while more are being written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.data.shards import Line, read_lines
from training.data.sound import Samples


@dataclass(frozen=True, slots=True)
class Entry:
    """One utterance: the memory-mapped samples of its shard, and its line."""

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

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[Samples, str, str]:
        entry = self.entries[index]
        line = entry.line
        return entry.pcm[line.offset : line.offset + line.samples], line.text, line.voice

    def __iter__(self) -> Iterator[tuple[Samples, str, str]]:
        return (self[index] for index in range(len(self)))
