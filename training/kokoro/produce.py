"""Speak phonemized utterances with Kokoro-82M and write shards that training reads while they are being written.

    python -m training.kokoro.produce --model DIR --utterances us.jsonl.gz gb.jsonl.gz --heldout heldout.jsonl.gz \\
        --out DIR

Shard 0 holds held-out sentences only, spoken by voices and by mixes that no other shard uses. A shard's `.jsonl` is
written last and by renaming, so a shard that has it is complete.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch

from training.kokoro.recordings import record, write_recordings
from training.kokoro.teacher import Teacher
from training.kokoro.utterances import Utterance, heldout_utterances, read_phonemized, training_utterances

ABOUT = "Speak phonemized utterances with Kokoro-82M and write shards that training reads while they are being written."


def pools(utterances: Sequence[Utterance], first: int, full: int) -> Iterator[list[Utterance]]:
    """Split into one small pool, so that training starts early, and full ones."""
    source = iter(utterances)
    size = first
    while pool := list(islice(source, size)):
        yield pool
        size = full


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.kokoro.produce", description=ABOUT)
    parser.add_argument("--model", type=Path, required=True, help="folder that training.kokoro.convert wrote")
    parser.add_argument("--utterances", type=Path, nargs="+", required=True, help="phonemized files to train on")
    parser.add_argument("--heldout", type=Path, required=True, help="phonemized held-out sentences, both accents")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--heldout-out", type=Path, help="folder for shard 0 (default: the same folder)")
    parser.add_argument("--hours", type=float, default=50.0, help="stop after about so many hours of speech")
    parser.add_argument("--mixed", type=float, default=0.6, help="share of utterances by mixed speakers")
    parser.add_argument("--timbres", type=float, default=0.0, help="share of mixed speakers with another timbre")
    parser.add_argument("--batch-seconds", type=float, default=640)
    parser.add_argument("--first-pool", type=int, default=1024, help="utterances in the first shard")
    parser.add_argument("--pool", type=int, default=4096, help="utterances in the other shards")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def produce(teacher: Teacher, utterances: Sequence[Utterance], options: argparse.Namespace) -> None:
    """Write shards 1, 2, ... until the utterances end or `options.hours` are there."""
    began, seconds = time.monotonic(), 0.0
    for shard, pool in enumerate(pools(utterances, options.first_pool, options.pool), 1):
        if seconds > 3600 * options.hours:
            return
        recordings = record(teacher, pool, options.batch_seconds)
        seconds += write_recordings(options.out, shard, recordings)
        print(f"shard {shard}: {seconds / 3600:.2f} h after {time.monotonic() - began:.1f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    heldout_out = options.heldout_out or options.out
    for folder in (options.out, heldout_out):
        folder.mkdir(parents=True, exist_ok=True)
    teacher = Teacher(options.model, options.device, torch.float16 if options.device == "cuda" else torch.float32)
    heldout = heldout_utterances(list(read_phonemized([options.heldout])), rng)
    write_recordings(heldout_out, 0, record(teacher, heldout, options.batch_seconds))
    lines = list(read_phonemized(options.utterances))
    produce(teacher, training_utterances(lines, rng, options.mixed, options.timbres), options)


if __name__ == "__main__":
    main()
