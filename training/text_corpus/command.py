"""Command line of the text corpus: `python -m training.text_corpus`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.text_corpus.corpus import make_corpus
from training.text_corpus.files import write_sentences
from training.text_corpus.wordnet import WORDNET, read_synsets

ABOUT = (
    "Sentences for the teachers to say: WordNet's definitions and examples, and templates of our own for everyday talk."
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.text_corpus", description=ABOUT)
    parser.add_argument("--out", type=Path, required=True, help="training sentences; heldout.txt is put beside them")
    parser.add_argument(
        "--wordnet", type=Path, default=WORDNET, help="folder with WordNet's data files (data.noun, data.verb, ...)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    corpus = make_corpus(read_synsets(options.wordnet), options.seed)
    write_sentences(options.out, corpus.training)
    write_sentences(options.out.parent / "heldout.txt", corpus.heldout)
    print(f"{len(corpus.training)} training sentences, {len(corpus.heldout)} held out")
