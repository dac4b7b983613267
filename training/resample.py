"""Let the language model speak a corpus again: the first code of every frame is given, all others are sampled.

    python -m training.resample --language build/lm/run/best --codes build/lm/codes --out build/lm/sampled

A decoder that was trained on the encoder's codes loses more than half a point of MOS on the language model's. Trained
on these, it learns what they mean. The first codes keep the speech where it is in time, so that the teacher's recording
is still the target; the others are sampled frame after frame, each with the sampled frames before it, as in service.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.load import load_model
from shoal.kernels.sample import probabilities
from shoal.model.cache import by_row
from shoal.model.config import BlockConfig
from shoal.model.dual_ar import DualAR
from training.encode import About, batches, follow, prompts_for
from training.language import residual_logits
from training.packing import OPENING_ID, SEMANTIC_BEGIN, Columns, EncodedShard
from training.sampled import SampledShard

TEMPERATURE = 0.7
TOP_P = (0.5, 0.8)  # each row's own lies between these
REFERENCES = (0, 1, 2)  # utterances of the same voice before the one that is sampled, each as likely
MOST_POSITIONS = 640
BATCH_POSITIONS = {"cuda": 393_216, "cpu": 2048}


@dataclass(frozen=True)
class Row:
    """What comes before an utterance's audio, and its true frames [n, codebooks]."""

    prompt: Columns
    frames: Columns

    def __len__(self) -> int:
        return len(self.prompt) + len(self.frames)


class LeftPaddedKVCache:
    """KV cache of rows that end together: row i begins behind padding[i] positions, which nothing attends to."""

    def __init__(self, config: BlockConfig, padding: Tensor, length: int, dtype: torch.dtype) -> None:
        shape = (config.n_layer, len(padding), config.n_local_heads, length, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=padding.device) for _ in range(2))
        self.visible = torch.arange(length, device=padding.device) >= padding[:, None]
        self.filled, self.last_layer = 0, config.n_layer - 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Matrix products over grouped queries: one query per row would leave most of a fused kernel idle."""
        rows, groups = self.keys.shape[1:3]
        q, k, v = (by_row(x, rows) for x in (q, k, v))
        begin, end = self.filled, self.filled + q.shape[-2]
        self.keys[layer, :, :, begin:end] = k
        self.values[layer, :, :, begin:end] = v
        if layer == self.last_layer:
            self.filled = end
        keys, values = self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
        # [rows, groups, queries of a group * T, d]
        grouped = q.unflatten(1, (groups, -1)).flatten(2, 3).to(keys.dtype) * q.shape[-1] ** -0.5
        at = torch.arange(begin, end, device=q.device).repeat(q.shape[1] // groups)
        allowed = (torch.arange(end, device=q.device) <= at[:, None]) & self.visible[:, None, None, :end]
        # Padding attends to nothing at all: a large negative number keeps its softmax finite.
        weights = (grouped @ keys.mT).float().masked_fill(~allowed, -1e9).softmax(-1).to(keys.dtype)
        return (weights @ values).unflatten(2, (-1, q.shape[-2])).flatten(1, 2).transpose(1, 2).flatten(0, 1)


@torch.inference_mode()
def sample_rows(model: DualAR, rows: Sequence[Row], top_p: Tensor, temperature: float = TEMPERATURE) -> list[Columns]:
    """Return the frames [n, codebooks] of each row with all codes but the first sampled, given top_p [rows]."""
    device, prompt, steps = model.device, max(len(row.prompt) for row in rows), max(len(row.frames) for row in rows)
    padding = torch.tensor([prompt - len(row.prompt) for row in rows], device=device)
    cache = LeftPaddedKVCache(model.config.slow, padding, prompt + steps, model.dtype)
    columns = np.zeros((len(rows), prompt + steps, rows[0].prompt.shape[1]), np.int64)
    for filled, row in zip(columns, rows, strict=True):
        filled[prompt - len(row.prompt) : prompt] = row.prompt
        filled[prompt : prompt + len(row.frames), 1:] = row.frames
    made = torch.from_numpy(columns).to(device)
    made[:, prompt:, 0] = made[:, prompt:, 1] + SEMANTIC_BEGIN
    begin = 0
    for end in range(prompt, prompt + steps):
        positions = (torch.arange(begin, end, device=device) - padding[:, None]).clamp_min(0)
        hidden = model.slow(made[:, begin:end].flatten(0, 1), positions.flatten(), cache)
        last = hidden.unflatten(0, (len(rows), -1))[:, -1]
        before = model.fast_input(last, model.slow.norm(last))
        made[:, end, 1:] = sample_frames(model, before, made[:, end, 1:], temperature, top_p)
        begin = end
    codes = made[:, prompt:, 1:].to("cpu", torch.int16).numpy()
    return [codes[index, : len(row.frames)] for index, row in enumerate(rows)]


def sample_frames(model: DualAR, before: Tensor, frames: Tensor, temperature: float, top_p: Tensor) -> Tensor:
    """Sample frames [n, codebooks] code by code after the first, given the hidden states before them [n, dim]."""
    codes = frames.clone()
    everything = torch.full((len(frames),), model.config.codebook_size, device=frames.device)
    warmth = torch.full((len(frames),), temperature, device=frames.device)
    for book in range(1, frames.shape[1]):
        logits = residual_logits(model.fast, before, codes[:, : book + 1])[:, -1].float()
        codes[:, book] = torch.multinomial(probabilities(logits, warmth, top_p, everything), 1).squeeze(-1)
    return codes


def rows_with_references(shard: EncodedShard, rng: random.Random) -> list[Row]:
    """Return each utterance behind an opening token and up to two others of its voice, as far as they fit."""
    utterances = shard.utterances()
    by_voice: dict[str, list[int]] = {}
    for index, voice in enumerate(shard.voices):
        by_voice.setdefault(voice, []).append(index)
    opening = np.zeros((1, shard.columns.shape[1]), np.int16)
    opening[0, 0] = OPENING_ID
    rows = []
    for index, (voice, own) in enumerate(zip(shard.voices, utterances, strict=True)):
        others = [other for other in by_voice[voice] if other != index]
        chosen = rng.sample(others, min(rng.choice(REFERENCES), len(others)))
        parts = [utterances[other] for other in chosen]
        while parts and 1 + sum(map(len, parts)) + len(own) > MOST_POSITIONS:
            parts.pop()
        audio = own[:, 0] >= SEMANTIC_BEGIN
        rows.append(Row(np.concatenate((opening, *parts, own[: int(audio.argmax())])), own[audio, 1:]))
    return rows


def resample_shard(model: DualAR, shard: EncodedShard, rng: random.Random) -> SampledShard:
    rows = rows_with_references(shard, rng)
    limits = torch.tensor([rng.uniform(*TOP_P) for _ in rows], device=model.device)
    found: dict[int, Columns] = {}
    for batch in batches([len(row) for row in rows], BATCH_POSITIONS[model.device.type]):
        found |= zip(batch, sample_rows(model, [rows[index] for index in batch], limits[batch]), strict=True)
    counts = np.array([len(row.frames) for row in rows], np.int32)
    sampled = [found[index] for index in range(len(rows))]
    return SampledShard(np.concatenate([row.frames for row in rows]), np.concatenate(sampled), shard.offsets, counts)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.resample", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--language", type=Path, required=True, help="folder `best` of training.dual_ar")
    parser.add_argument("--codes", type=Path, required=True, help="folder that training.encode writes")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--follow", action="store_true", help="wait for more shards as long as the parent lives")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = prompts_for(About.read(options.language)).grid.tokenizer
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(options.language, tokenizer, dtype=dtype).to(device).eval()
    work = worker(model, options.codes, options.out)
    follow(work) if options.follow else work()


def worker(model: DualAR, codes: Path, out: Path) -> Callable[[], int]:
    """Return a function that resamples the shards which `out` lacks and returns how many there were."""

    def work() -> int:
        missing = [path for path in sorted(codes.glob("shard-*.npz")) if not (out / path.name).exists()]
        for path in missing:
            began = time.monotonic()
            resample_shard(model, EncodedShard.read(path), random.Random(path.name)).write(out / path.name)
            print(f"{path.name} in {time.monotonic() - began:.1f} s", flush=True)
        return len(missing)

    return work


if __name__ == "__main__":
    main()
