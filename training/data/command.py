"""The command that speaks the corpus: `python -m training.data`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from training.data.corpus import Corpus
from training.data.plan import JOIN_SHARE, TEMPO_RANGE, HeldoutPlan, Plan
from training.data.voices import VOICES
from training.data.workers import generate
from training.text_corpus import read_sentences

ABOUT = "Synthesise the training corpus of `nano`: teachers speak, workers write shards, training reads them at once."


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.data", description=ABOUT)
    parser.add_argument("--text", type=Path, required=True, help="one sentence per line (.gz read too)")
    parser.add_argument("--teachers", type=Path, required=True, help="folder made by training/teachers/build.sh")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--hours", type=float, default=1.0, help="length of the corpus, about")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--voices", nargs="+", choices=[voice.name for voice in VOICES], metavar="VOICE")
    parser.add_argument("--vary-tempo", action="store_true", help=f"each utterance up to {TEMPO_RANGE:.0%}% off tempo")
    parser.add_argument("--join", action="store_true", help=f"{JOIN_SHARE:.0%}% of utterances are two sentences")
    parser.add_argument("--heldout", action="store_true", help="every sentence of --text once in every voice")
    return parser.parse_args(arguments)


def make_plan(options: argparse.Namespace) -> Plan:
    voices = [voice for voice in VOICES if options.voices is None or voice.name in options.voices]
    sentences = read_sentences(options.text)
    if options.heldout:
        return HeldoutPlan(sentences, voices)
    return Plan(sentences, voices, options.seed, options.vary_tempo, options.join)


def stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, stop)
    try:
        made = generate(make_plan(options), options.teachers, options.out, options.hours, options.processes)
    except KeyboardInterrupt:
        raise SystemExit("stopped; complete shards are kept, run again to go on") from None
    corpus = Corpus(options.out)
    print(f"{made} shards made; {options.out} holds {len(corpus)} utterances, {corpus.hours:.2f} h")
