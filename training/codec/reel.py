"""Training corpus in device memory, cropped at random."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.sampled import SampledShard

PHONEMES_PER_SECOND = 40
UNKNOWN = 255  # phoneme id where a shard has no `.phonemes`


class Reel:
    """Concatenated int16 corpus in device memory; grows as shards are finished. The first shard is held out."""

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

        The id is that of the first third of the frame: a causal encoder has then received enough of the phoneme.
        """
        steps = (self.filled - length) // self.phoneme_step
        start = (torch.rand(count, device=self.samples.device, dtype=torch.float64) * steps).long() * self.phoneme_step
        where = start[:, None] + torch.arange(length, device=start.device)
        places = (start[:, None] + torch.arange(frame // 3, length, frame, device=start.device)) // self.phoneme_step
        return self.samples[where].float() / 32768, self.phonemes[places].long()

    def crops(self, count: int, length: int) -> Tensor:
        """Return random excerpts [count, length], which may span two utterances."""
        start = (torch.rand(count, device=self.samples.device, dtype=torch.float64) * (self.filled - length)).long()
        where = start[:, None] + torch.arange(length, device=start.device)
        return self.samples[where].float() / 32768

    def held_out_crops(self, count: int, length: int) -> Tensor:
        """Return excerpts [count, length] at fixed, even intervals of the held-out shard."""
        count = min(count, len(self.held_out) // length)
        starts = [index * (len(self.held_out) - length) // max(count - 1, 1) for index in range(count)]
        return torch.stack([self.held_out[start : start + length] for start in starts])

    def wait(self, least: int, seconds: float) -> None:
        """Wait until `least` samples and the held-out shard are available."""
        end = time.monotonic() + seconds
        while self.count < least or not len(self.held_out):
            if time.monotonic() > end:
                raise TimeoutError(f"{self.folder}: {self.count} samples after {seconds:.0f} s")
            self.refresh()
            time.sleep(0.2)


class CodedReel(Reel):
    """Speech with its codes, the encoder's and those that the language model sampled (`training.resample`).

    The shard that is held out comes without sampled codes.
    """

    def __init__(
        self,
        folder: Path,
        sampled: Path,
        hours: float,
        rate: int,
        frame: int,
        crop: int,
        books: int,
        device: torch.device,
    ) -> None:
        super().__init__(folder, hours, rate, device)
        self.sampled, self.frame, self.crop = sampled, frame, crop
        most = int(hours * 3600 * rate / frame)
        self.codes = torch.zeros(2, most, books, dtype=torch.int16, device=device)  # the encoder's, sampled
        # Places where a crop may begin: first sample, first frame.
        self.places = torch.zeros(most, 2, dtype=torch.long, device=device)
        self.placed = torch.zeros((), dtype=torch.long, device=device)
        self.frames = 0

    def _append(self, stem: str) -> None:
        path = (self.sampled / stem).with_suffix(".npz")
        if stem != self.HELD_OUT and not path.exists():
            self._seen.discard(stem)
            return
        before = self.count
        super()._append(stem)
        if stem != self.HELD_OUT:
            self._append_codes(SampledShard.read(path), before)

    def _append_codes(self, shard: SampledShard, first_sample: int) -> None:
        count = len(shard.true)
        if self.frames + count > self.codes.shape[1]:
            return
        for kind, codes in enumerate((shard.true, shard.sampled)):
            self.codes[kind, self.frames : self.frames + count] = torch.from_numpy(codes).to(self.codes.device)
        places = crop_places(shard, self.crop, self.frame) + np.array([first_sample, self.frames])
        places = places[places[:, 0] + self.crop * self.frame <= self.count]
        begin = int(self.placed)
        self.places[begin : begin + len(places)] = torch.from_numpy(places).to(self.places.device)
        self.placed.fill_(begin + len(places))
        self.frames += count

    def coded_crops(self, count: int, sampled: float) -> tuple[Tensor, Tensor]:
        """Return random stretches [count, crop * frame] and their codes [count, crop, codebooks].

        A share `sampled` of the stretches comes with sampled codes, the rest with the encoder's.
        """
        device = self.places.device
        chosen = (torch.rand(count, device=device, dtype=torch.float64) * self.placed).long()
        sample, frame = self.places[chosen].unbind(-1)
        kind = (torch.rand(count, device=device) < sampled).long()
        samples = self.samples[sample[:, None] + torch.arange(self.crop * self.frame, device=device)].float() / 32768
        return samples, self.codes[kind[:, None], frame[:, None] + torch.arange(self.crop, device=device)].long()


def crop_places(shard: SampledShard, crop: int, frame: int) -> NDArray[np.int64]:
    """Return (sample, frame) within the shard [n, 2] of every frame that `crop` frames of its utterance follow."""
    firsts = np.cumsum(shard.frames) - shard.frames
    places = [
        np.stack((offset + frame * np.arange(count - crop + 1), first + np.arange(count - crop + 1)), axis=1)
        for offset, first, count in zip(shard.offsets, firsts, shard.frames, strict=True)
        if count >= crop
    ]
    return np.concatenate((np.zeros((0, 2), np.int64), *places))
