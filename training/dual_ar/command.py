"""The command that trains: `python -m training.dual_ar`."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from training.dual_ar.ladder import compile_losses
from training.dual_ar.plan import Plan
from training.dual_ar.run import Run
from training.dual_ar.trainer import Trainer
from training.encode import ABOUT, About
from training.language import SHAPES, model_config
from training.makers import Makers, Speaking
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
    parser.add_argument("--hours", type=float, default=400.0, help="most speech to make, and to keep in device memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=Plan.max_steps)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--plain", action="store_true", help="neither compile nor capture")
    _add_speaking(parser.add_argument_group("speak and encode the corpus meanwhile"))
    options = parser.parse_args(arguments)
    speaking = (options.teachers, options.text, options.heldout_text, options.codec, options.speech)
    if any(speaking) and not all(speaking):
        parser.error("--teachers, --text, --heldout-text, --codec and --speech go together")
    return options


def _add_speaking(making: argparse._ArgumentGroup) -> None:
    making.add_argument("--teachers", type=Path, help="folder made by training/teachers/build.sh")
    making.add_argument("--text", type=Path, help="sentences to train on")
    making.add_argument("--heldout-text", type=Path, help="sentences to validate on")
    making.add_argument("--codec", type=Path, help="folder of the finished codec")
    making.add_argument("--codebooks", type=int, help="use the first so many of the codec's; all if not given")
    making.add_argument("--speech", type=Path, help="folder for the recordings, which are emptied once encoded")
    making.add_argument("--processes", type=int, default=14, help="processes that speak")


def make_plan(options: argparse.Namespace, about: About) -> Plan:
    named = (
        "minutes", "rows", "length", "residual_frames", "validation_rows", "matrix_rate", "rate", "dropout",
        "least_hours", "seed", "max_steps",
    )  # fmt: skip
    config = model_config(SHAPES[options.shape], about.codebooks, about.codebook_size)
    return replace(Plan(config), **{name: getattr(options, name) for name in named})


def speaking(options: argparse.Namespace) -> Speaking | None:
    """What to run beside the training, if anything."""
    if options.teachers is None:
        return None
    return Speaking(
        teachers=options.teachers,
        text=options.text,
        heldout_text=options.heldout_text,
        codec=options.codec,
        codebooks=options.codebooks,
        speech=options.speech,
        codes=options.codes,
        heldout_codes=options.heldout_codes,
        hours=options.hours,
        processes=options.processes,
    )


def wait_for(ready: Callable[[], bool], what: str, seconds: float, makers: Makers) -> None:
    """Until it is ready; raises TimeoutError, or RuntimeError if those who should make it have failed."""
    end = time.monotonic() + seconds
    while not ready():
        makers.check()
        if time.monotonic() > end:
            raise TimeoutError(f"{what} after {seconds:.0f} s")
        time.sleep(0.3)


def train(options: argparse.Namespace, makers: Makers, began: float) -> None:
    limit = 60 * options.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait_for((options.codes / ABOUT).exists, f"{options.codes}: no codes", limit, makers)
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

    wait_for(enough, f"{options.codes}: too few codes", limit, makers)
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
    with Makers.start(speaking(options), options.out) as makers:
        train(options, makers, began)
