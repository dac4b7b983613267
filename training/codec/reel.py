"""The corpus where the steps can reach it: in device memory, cropped at random."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PHONEMES_PER_SECOND = 40
UNKNOWN = 255  # phoneme id where a shard has no `.phonemes`


class Reel:
    """The corpus in device memory, int16, end to end; grows as shards are finished. The first shard is held out."""

    HELD_OUT = "shard-00000"

    def __init__(self, folder: Path, hours: float, sample_rate: int, device: torch.device) -> None:
        self.folder, self.rate = folder, sample_rate
        self.samples = torch.zeros(int(hours * 3600 * sample_rate), dtype=torch.int16, device=device)
        self.phoneme_step = sample_rate // PHONEMES_PER_SECOND
        count = len(self.samples) // self.phoneme_step + 1
        self.phonemes = torch.full((count,), UNKNOWN, dtype=torch.uint8, device=device)
        self.filled = torch.zeros((), dtype=torch.long, device=device)
        self.held_out = torch.zeros(0, device=device)
        self.count = 0
        self._seen: set[str] = set()

    @property
    def hours(self) -> float:
        return self.count / self.rate / 3600

    def refresh(self) -> None:
        for lines in sorted(self.folder.glob("shard-*.jsonl")):
            if lines.stem not in self._seen:
                self._seen.add(lines.stem)
                self._append(lines.stem)

    def _append(self, stem: str) -> None:
        sound = torch.from_numpy(np.fromfile((self.folder / stem).with_suffix(".pcm"), dtype="<i2"))
        if stem == self.HELD_OUT:
            self.held_out = sound.to(self.samples.device).float() / 32768
            return
        sound = sound[: len(self.samples) - self.count]
        self.samples[self.count : self.count + len(sound)] = sound.to(self.samples.device)
        self._append_phonemes((self.folder / stem).with_suffix(".phonemes"))
        self.count += len(sound)
        self.filled.fill_(self.count)

    def _append_phonemes(self, path: Path) -> None:
        """Read the phoneme ids of the shard that begins at `count`. Shards with ids hold whole steps of samples."""
        if path.exists():
            ids = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
            first = self.count // self.phoneme_step
            ids = ids[: len(self.phonemes) - first]
            self.phonemes[first : first + len(ids)] = ids.to(self.phonemes.device)

    def labelled_crops(self, count: int, length: int, frame: int) -> tuple[Tensor, Tensor]:
        """Return random stretches [count, length] and the phoneme id of each frame [count, length / frame].

        The id is that of the first third of the frame: a causal encoder has then heard enough of the phoneme.
        """
        steps = (self.filled - length) // self.phoneme_step
        start = (torch.rand(count, device=self.samples.device, dtype=torch.float64) * steps).long() * self.phoneme_step
        where = start[:, None] + torch.arange(length, device=start.device)
        places = (start[:, None] + torch.arange(frame // 3, length, frame, device=start.device)) // self.phoneme_step
        return self.samples[where].float() / 32768, self.phonemes[places].long()

    def crops(self, count: int, length: int) -> Tensor:
        """Random stretches [count, length]. They may run from one utterance into the next, as speech does."""
        start = (torch.rand(count, device=self.samples.device, dtype=torch.float64) * (self.filled - length)).long()
        where = start[:, None] + torch.arange(length, device=start.device)
        return self.samples[where].float() / 32768

    def held_out_crops(self, count: int, length: int) -> Tensor:
        """Always the same stretches [count, length], spread over the held-out shard."""
        count = min(count, len(self.held_out) // length)
        starts = [index * (len(self.held_out) - length) // max(count - 1, 1) for index in range(count)]
        return torch.stack([self.held_out[start : start + length] for start in starts])

    def wait(self, least: int, seconds: float) -> None:
        """Until `least` samples and the held-out shard are there."""
        end = time.monotonic() + seconds
        while self.count < least or not len(self.held_out):
            if time.monotonic() > end:
                raise TimeoutError(f"{self.folder}: {self.count} samples after {seconds:.0f} s")
            self.refresh()
            time.sleep(0.2)
