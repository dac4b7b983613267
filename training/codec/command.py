"""Command line of codec training: `python -m training.codec`."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shoal.codec.config import CodecConfig
from training.codec.compile import compile_decoding, compile_networks
from training.codec.files import load_codec
from training.codec.initialisation import initialise
from training.codec.plan import CONFIGS, Plan
from training.codec.reel import CodedReel, Reel
from training.codec.run import COMPANIONS, Run, load_companions
from training.codec.trainer import Trainer
from training.run import restore

ABOUT = "Train the codec of `nano`: the modules of `shoal.codec` themselves, on shards that may still be being written."


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.codec", description=ABOUT)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of shards; may still be growing")
    parser.add_argument("--out", type=Path, required=True, help="log, checkpoint and the finished codec")
    parser.add_argument("--minutes", type=float, default=Plan.minutes, help="wall clock from start to finished files")
    parser.add_argument("--hours", type=float, default=120.0, help="most speech to keep in device memory")
    parser.add_argument("--config", choices=sorted(CONFIGS), default="16k", help="shape of a new codec")
    parser.add_argument("--augmented", type=float, default=Plan.augmented_share, help="share of augmented examples")
    parser.add_argument("--phoneme-weight", type=float, default=Plan.phoneme_weight)
    parser.add_argument("--free-steps", type=int, default=Plan.free_steps, help="steps before the codebooks join")
    parser.add_argument("--batch", type=int, default=Plan.batch)
    parser.add_argument("--frames", type=int, default=Plan.frames, help="frames per example")
    parser.add_argument("--decoded-frames", type=int, default=0, help="frames per example to decode; 0: all")
    parser.add_argument("--depth", type=int, help="number of codebooks to train with, from the first on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=Plan.rate, help="peak learning rate of the codec")
    parser.add_argument("--discriminator-rate", type=float, default=Plan.discriminator_rate)
    parser.add_argument(
        "--final-rate", type=float, default=Plan.final_share, help="last learning rate, as a share of the peak"
    )
    parser.add_argument(
        "--adversary-from", type=float, default=Plan.adversary_from, help="share of time before discriminators join"
    )
    parser.add_argument("--max-steps", type=int, default=Plan.max_steps)
    parser.add_argument("--resume", type=Path, help="checkpoint (state.pt) to continue, on its own schedule")
    parser.add_argument("--start", type=Path, help="folder of a finished codec to begin a new schedule with")
    parser.add_argument("--freeze-codes", action="store_true", help="with --start: train the decoding side only")
    parser.add_argument("--sampled", type=Path, help="with --freeze-codes: folder that training.resample writes")
    parser.add_argument("--sampled-share", type=float, default=0.7, help="share of examples with sampled codes")
    parser.add_argument("--compile-decoder-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help="neither compile nor capture")
    options = parser.parse_args(arguments)
    if options.freeze_codes and options.start is None and options.resume is None:
        parser.error("--freeze-codes needs the codec whose codes to keep: --start or --resume")
    if options.sampled is not None and (not options.freeze_codes or options.depth is None):
        parser.error("--sampled needs --freeze-codes and the --depth of the language model's codes")
    return options


def make_plan(options: argparse.Namespace) -> Plan:
    plan = Plan(
        config=CONFIGS[options.config],
        augmented_share=options.augmented,
        phoneme_weight=options.phoneme_weight,
        free_steps=options.free_steps,
        minutes=options.minutes,
        batch=options.batch,
        frames=options.frames,
        seed=options.seed,
        rate=options.rate,
        discriminator_rate=options.discriminator_rate,
        adversary_from=options.adversary_from,
        final_share=options.final_rate,
        max_steps=options.max_steps,
        freeze_codes=options.freeze_codes,
        decoded_frames=options.decoded_frames,
        sampled_share=options.sampled_share if options.sampled is not None else 0.0,
        depths=Plan.depths if options.depth is None else (options.depth,),
    )
    if options.resume is not None:
        config = torch.load(options.resume, map_location="cpu", weights_only=True)["config"]
        return replace(plan, config=CodecConfig.from_dict(config))
    if options.start is not None:
        return replace(plan, config=load_codec(options.start).config, adversary_from=0.0)
    return plan


def prepare(trainer: Trainer, options: argparse.Namespace) -> float:
    """Initialise or load the trainer's weights; return the seconds that an earlier run has taken."""
    if options.resume is not None:
        restore(trainer, options.resume)
        return trainer.pace.spent
    if options.start is not None:
        trainer.codec.load_state_dict(load_codec(options.start).state_dict())
        load_companions(trainer, options.start / COMPANIONS)
        trainer.pace.quantised_from = 0
    else:
        initialise(trainer.codec, trainer.reel.crops(trainer.plan.batch, trainer.plan.length))
    trainer.follow()
    return 0.0


def make_reel(options: argparse.Namespace, plan: Plan, hours: float, device: torch.device) -> Reel:
    config = plan.config
    if options.sampled is None:
        return Reel(options.corpus, hours, config.sample_rate, device)
    sizes = (config.sample_rate, config.frame_length, plan.frames, options.depth)
    return CodedReel(options.corpus, options.sampled, hours, *sizes, device)


def start_compiling_decoder(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process that compiles the decoder into the compiler's cache while this one compiles the encoder."""
    return subprocess.Popen([sys.executable, "-m", "training.codec", *arguments, "--compile-decoder-only"])


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    began = time.monotonic()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    plan = make_plan(options)
    hours = 0.01 if options.compile_decoder_only else options.hours
    reel = make_reel(options, plan, hours, device)
    trainer = Trainer(plan, reel, device, dtype)
    if options.compile_decoder_only:
        compile_decoding(trainer)
        return
    if not options.plain:
        compile_networks(trainer, start_compiling_decoder(arguments))
    reel.wait(20 * plan.batch * plan.length, 60 * plan.minutes)
    spent = prepare(trainer, options)
    Run(trainer, options.out, began - spent, capture=not options.plain).go()
