"""Batched synthesis with Kokoro-82M: phonemes, style vectors and speeds in; audio, durations and word times out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from training.kokoro import network

SAMPLE_RATE = 24_000
FRAME = 600  # samples per frame of the duration model, 25 ms
BUCKET = 8  # frames; utterances whose lengths round up to the same multiple are decoded together
LEAD = 3  # frames; the audio runs this much ahead of the predicted durations
BLOCK = 120  # samples per entry of Speech.audible, 5 ms
SILENCE = 10 ** (-35 / 20)  # blocks quieter than this, relative to the loudest block of the utterance, are silent


@dataclass
class Speech:
    """One decoded batch. Rows are padded at the end: row i holds `frames[i].sum()` frames of speech."""

    rows: list[int]  # positions in the input
    audio: Tensor  # [B, samples], float32, 24 kHz, on the device
    frames: list[Tensor]  # frames of each token; the first and the last token are silence
    audible: np.ndarray  # [B, samples / BLOCK], bool


class Teacher:
    """Kokoro-82M on one device. Not thread-safe."""

    def __init__(self, folder: Path, device: str = "cuda", dtype: torch.dtype = torch.float16) -> None:
        self.device = torch.device(device)
        self.vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        tables = np.load(folder / "voices.npz")
        self.voices = {name: torch.from_numpy(tables[name].astype(np.float32)) for name in tables.files}
        self.network = network.load_network(folder).to(self.device)
        self.network.decoder.to(dtype)
        self.network.decoder.generator.m_source.float()  # the phase of the harmonics needs float32

    def style(self, mix: dict[str, float], phonemes: str) -> Tensor:
        """Return the style vector [256] of a weighted mix of voices. The tables are indexed by phoneme count."""
        return sum(weight * self.voices[voice][len(phonemes) - 1] for voice, weight in mix.items())

    @torch.inference_mode()
    def speak(
        self,
        phonemes: Sequence[str],
        styles: Tensor,
        speeds: Tensor,
        batch_seconds: float = 640,
        pitches: Tensor | None = None,
    ) -> Iterator[Speech]:
        """Yield batches of equal length, shortest first.

        styles [N, 256], speeds [N] (1.1 is 10 % faster), pitches [N] (1.1 is 10 % higher; the formants stay).
        N should be thousands: the more utterances there are of one length, the fuller the batches.
        """
        styles = styles.to(self.device)
        pitches = torch.ones(len(phonemes)) if pitches is None else pitches
        pitches = pitches.to(self.device)
        prosody, text, frames = self._encode(phonemes, styles, speeds.to(self.device))
        on_host = frames.cpu()
        buckets: dict[int, list[int]] = {}
        for row, total in enumerate(on_host.sum(1).tolist()):
            buckets.setdefault(-(-total // BUCKET) * BUCKET, []).append(row)
        for length, rows in sorted(buckets.items()):
            full = max(1, int(batch_seconds * SAMPLE_RATE / (length * FRAME)))
            for start in range(0, len(rows), full):
                batch = rows[start : start + full]
                padded = batch + batch[-1:] * (batch_size(len(batch), full) - len(batch))
                audio = self._decode(prosody, text, frames, styles, pitches, padded, length)[: len(batch)]
                counts = [on_host[row, : len(phonemes[row]) + 2] for row in batch]
                yield Speech(batch, audio, counts, audible_blocks(audio))

    def _encode(self, phonemes: Sequence[str], styles: Tensor, speeds: Tensor, size: int = 256) -> tuple[Tensor, ...]:
        """Return prosody features [N, T, 640], text features [N, T, 512] and frames per token [N, T], zero padded."""
        order = sorted(range(len(phonemes)), key=lambda row: len(phonemes[row]))
        longest = len(phonemes[order[-1]]) + 2
        outputs = []
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            batch = self._encode_batch([phonemes[row] for row in rows], styles[rows], speeds[rows])
            outputs.append([F.pad(x, [0, 0] * (x.dim() - 2) + [0, longest - x.shape[1]]) for x in batch])
        back = torch.tensor(order, device=self.device).argsort()
        return tuple(torch.cat(parts)[back] for parts in zip(*outputs, strict=True))

    def _encode_batch(self, phonemes: list[str], styles: Tensor, speeds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        net, style = self.network, styles[:, 128:]
        lengths = torch.tensor([len(text) + 2 for text in phonemes])
        tokens = torch.zeros(len(phonemes), int(lengths.max()), dtype=torch.long)
        for row, text in enumerate(phonemes):
            tokens[row, 1 : len(text) + 1] = torch.tensor([self.vocab[c] for c in text])
        padding = (torch.arange(tokens.shape[1]) >= lengths[:, None]).to(self.device)
        tokens = tokens.to(self.device)
        hidden = net.bert_encoder(net.bert(tokens, attention_mask=(~padding).int())).transpose(1, 2)
        prosody = net.predictor.text_encoder(hidden, style, lengths, padding)
        packed = pack_padded_sequence(prosody, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(net.predictor.lstm(packed)[0], batch_first=True)
        frames = torch.sigmoid(net.predictor.duration_proj(states)).sum(-1) / speeds[:, None]
        frames = frames.round().clamp(min=1).long().masked_fill(padding, 0)
        return prosody, net.text_encoder(tokens, lengths, padding).transpose(1, 2), frames

    def _decode(
        self,
        prosody: Tensor,
        text: Tensor,
        frames: Tensor,
        styles: Tensor,
        pitches: Tensor,
        rows: list[int],
        length: int,
    ) -> Tensor:
        """Decode `rows` at `length` frames each; the closing silence of each row is stretched to fill it."""
        # Equal lengths, because padding would enter the statistics of the decoder's instance norms.
        index = torch.tensor(rows, device=self.device)
        counts, style = frames[index], styles[index]
        times = torch.arange(length, device=self.device).expand(len(rows), -1).contiguous()
        last = (counts > 0).sum(1, keepdim=True) - 1
        token = torch.minimum(torch.searchsorted(counts.cumsum(1), times, right=True), last)[..., None]
        prosody = prosody[index].gather(1, token.expand(-1, -1, prosody.shape[2])).transpose(1, 2)
        text = text[index].gather(1, token.expand(-1, -1, text.shape[2])).transpose(1, 2)
        f0, energy = self.network.predictor.F0Ntrain(prosody, style[:, 128:])
        return network.decode(self.network.decoder, text, f0 * pitches[index, None], energy, style[:, :128])


def batch_size(count: int, full: int) -> int:
    """Round the size of a last batch up to full / 1, 2, 4 or 8: cuDNN needs tens of milliseconds for a new shape."""
    size = full
    while size >= 2 * count and size > full // 8:
        size //= 2
    return max(size, count)


def audible_blocks(audio: Tensor) -> np.ndarray:
    level = audio.unflatten(1, (-1, BLOCK)).square().mean(2).sqrt()
    return (level > SILENCE * level.amax(1, keepdim=True)).cpu().numpy()


def word_times(
    words: Sequence[tuple[str, int, int]], phonemes: str, frames: Tensor, audible: np.ndarray
) -> list[tuple[str, float, float]]:
    """Return (word, start, end) in seconds. `words` holds spans in `phonemes`; the rest is one row of Speech."""
    edges = np.concatenate([[0], frames.cumsum(0)]) - LEAD  # edges[i + 1] is the start of phonemes[i]
    times = []
    for word, first, last in words:
        # Two words share the space between them. A pause belongs to neither: the model books it on the last phoneme.
        start = edges[first : first + 2].mean() if phonemes[:first].endswith(" ") else edges[first + 1]
        end = edges[last + 1 : last + 3].mean() if phonemes[last:].startswith(" ") else edges[last + 1]
        begin, stop = (max(0, round(edge * FRAME / BLOCK)) for edge in (start, end))
        heard = np.flatnonzero(audible[begin:stop])
        if len(heard):
            begin, stop = begin + int(heard[0]), begin + int(heard[-1]) + 1
        times.append((word, round(begin * BLOCK / SAMPLE_RATE, 3), round(stop * BLOCK / SAMPLE_RATE, 3)))
    return times
