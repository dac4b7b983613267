"""Command line of language model training: `python -m training.dual_ar`."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from training.dual_ar.compile import compile_losses
from training.dual_ar.files import read_language_model
from training.dual_ar.plan import Plan
from training.dual_ar.run import Run
from training.dual_ar.trainer import Trainer
from training.encode import ABOUT, About
from training.language import SHAPES, model_config
from training.packing import Library
from training.run import STATE, restore

DESCRIPTION = (
    "Train the language model of `nano`: the modules of `shoal.model` themselves, on codes that are still being made."
)
POSITIONS_PER_HOUR = 180_000  # 25 frames a second, and the text beside them


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.dual_ar", description=DESCRIPTION)
    parser.add_argument("--codes", type=Path, required=True, help="folder of encoded shards; may still be growing")
    parser.add_argument("--heldout-codes", type=Path, required=True, help="the same of held-out sentences")
    parser.add_argument("--out", type=Path, required=True, help="log, checkpoint and the finished model")
    parser.add_argument("--minutes", type=float, default=Plan.minutes, help="wall clock from start to finished files")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="nano")
    parser.add_argument("--rows", type=int, default=Plan.rows, help="rows per step")
    parser.add_argument("--length", type=int, default=Plan.length, help="positions per row")
    parser.add_argument("--residual-frames", type=int, default=Plan.residual_frames)
    parser.add_argument("--validation-rows", type=int, default=Plan.validation_rows)
    parser.add_argument("--matrix-rate", type=float, default=Plan.matrix_rate, help="peak rate inside the layers")
    parser.add_argument("--rate", type=float, default=Plan.rate, help="peak rate of embeddings, heads and norms")
    parser.add_argument("--dropout", type=float, default=Plan.dropout)
    parser.add_argument("--least-hours", type=float, default=Plan.least_hours, help="speech to wait for before step 1")
    parser.add_argument("--hours", type=float, default=400.0, help="most speech to keep in device memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=Plan.max_steps)
    parser.add_argument(
        "--start", type=Path, help="finished model to begin with; its fast transformer may have fewer layers"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--plain", action="store_true", help="neither compile nor capture")
    return parser.parse_args(arguments)


def make_plan(options: argparse.Namespace, about: About) -> Plan:
    named = (
        "minutes", "rows", "length", "residual_frames", "validation_rows", "matrix_rate", "rate", "dropout",
        "least_hours", "seed", "max_steps",
    )  # fmt: skip
    config = model_config(SHAPES[options.shape], about.codebooks, about.codebook_size)
    return replace(Plan(config), **{name: getattr(options, name) for name in named})


def wait_for(ready: Callable[[], bool], what: str, seconds: float) -> None:
    """Wait until `ready` returns True; raises TimeoutError."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} after {seconds:.0f} s")
        time.sleep(0.3)


def train(options: argparse.Namespace, began: float) -> None:
    limit = 60 * options.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait_for((options.codes / ABOUT).exists, f"{options.codes}: no codes", limit)
    about = About.read(options.codes)
    plan = make_plan(options, about)
    capacity = int(options.hours * POSITIONS_PER_HOUR)
    library = Library(options.codes, about.codebooks, capacity, device)
    heldout = Library(options.heldout_codes, about.codebooks, capacity // 20 + 1_000_000, device)
    trainer = Trainer(plan, library, heldout, device)
    if not options.plain:
        compile_losses(trainer)
    least = plan.least_hours * 3600 * about.sample_rate / about.frame_length

    def enough() -> bool:
        library.refresh()
        heldout.refresh()
        return library.frames >= least and len(heldout) > 0

    wait_for(enough, f"{options.codes}: too few codes", limit)
    if options.start is not None:
        trainer.begin_with(read_language_model(options.start))
    if options.resume:
        restore(trainer, options.out / STATE)
        began -= trainer.pace.spent
    Run(trainer, options.out, began, about=about, capture=not options.plain).go()


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    began = time.monotonic()
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    train(options, began)
