"""Replace the codes of speech by codes that the language model samples, all but the first of each frame.

    python -m training.resample --language build/lm/run/best --codes build/lm/codes --out build/lm/sampled

A decoder that was trained on the encoder's codes loses half a point of MOS or more on codes of the language model, so
it is trained on these as well. Every frame is sampled after the true frames before it, so that it keeps its time and
pitch in the recording. Frames that are sampled one after the other, as in service, leave the recording: the mel
distance of 7 held-out clips was 1.53 instead of 1.28 (0.85 with the encoder's codes).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.load import load_model
from shoal.kernels.sampling.sample import probabilities
from shoal.model.dual_ar import DualAR
from training.encode import About, batches, follow, prompts_for
from training.language import hidden_states, is_audio, residual_logits
from training.packing import OPENING_ID, SEMANTIC_BEGIN, Columns, EncodedShard
from training.sampled import SampledShard

TEMPERATURE, TOP_P = 0.7, 0.5  # defaults of the shipped model
REFERENCES = (0, 1, 2)  # numbers of utterances of the same voice before the sampled one, equally likely
MOST_POSITIONS = 1024
BATCH_POSITIONS = {"cuda": 65_536, "cpu": 2048}


@torch.no_grad()
def sample_residuals(model: DualAR, columns: Tensor, temperature: float = TEMPERATURE, top_p: float = TOP_P) -> Tensor:
    """Replace all codes but the first of the audio in columns [rows, length, 1 + codebooks] by sampled ones."""
    hidden = hidden_states(model, columns[:, :-1])
    targets = columns[:, 1:].flatten(0, 1)
    places = is_audio(targets[:, 0]).nonzero().squeeze(-1)
    before = model.fast_input(hidden, model.slow.norm(hidden))[places]
    made = targets.clone()
    made[places, 1:] = sample_frames(model, before, targets[places, 1:], temperature, top_p)
    return torch.cat((columns[:, :1], made.view(len(columns), -1, columns.shape[-1])), dim=1)


def sample_frames(model: DualAR, before: Tensor, frames: Tensor, temperature: float, top_p: float) -> Tensor:
    """Sample frames [n, codebooks] code by code after the first, given the hidden states before them [n, dim]."""
    codes = frames.clone()
    settings = [torch.full((len(frames),), value, device=frames.device) for value in (temperature, top_p)]
    everything = torch.full((len(frames),), model.config.codebook_size, device=frames.device)
    for book in range(1, frames.shape[1]):
        logits = residual_logits(model.fast, before, codes[:, : book + 1])[:, -1].float()
        codes[:, book] = torch.multinomial(probabilities(logits, *settings, everything), 1).squeeze(-1)
    return codes


def rows_with_references(shard: EncodedShard, rng: random.Random) -> list[Columns]:
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
        rows.append(np.concatenate((opening, *parts, own)))
    return rows


def resample_shard(model: DualAR, shard: EncodedShard, rng: random.Random) -> SampledShard:
    rows, found = rows_with_references(shard, rng), {}
    for batch in batches([len(row) for row in rows], BATCH_POSITIONS[model.device.type]):
        padded = np.zeros((len(batch), len(rows[batch[0]]), shard.columns.shape[1]), np.int64)
        for place, index in enumerate(batch):
            padded[place, : len(rows[index])] = rows[index]
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            made = sample_residuals(model, torch.from_numpy(padded).to(model.device)).cpu().numpy().astype(np.int16)
        for place, index in enumerate(batch):
            end = len(rows[index])
            found[index] = frames_of(made[place, end - shard.lengths[index] : end])
    utterances = shard.utterances()
    true = [frames_of(columns) for columns in utterances]
    counts = np.array([len(frames) for frames in true], np.int32)
    sampled = [found[index] for index in range(len(rows))]
    return SampledShard(np.concatenate(true), np.concatenate(sampled), shard.offsets, counts)


def frames_of(columns: Columns) -> Columns:
    """Return the codes [frames, codebooks] of an utterance's audio."""
    return columns[columns[:, 0] >= SEMANTIC_BEGIN, 1:]


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
    model = load_model(options.language, tokenizer, dtype=torch.float32).to(device).eval()
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
