"""Text corpus: training and held-out sentences, without overlap."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from training.text_corpus.heldout import (
    HELDOUT,
    HELDOUT_EXAMPLES,
    bucket,
    heldout_key,
    in_heldout_bucket,
    suits_heldout,
)
from training.text_corpus.templates import template_sentences
from training.text_corpus.wordnet import Synset, wordnet_definitions, wordnet_examples, wordnet_phrases


@dataclass(frozen=True, slots=True)
class TextCorpus:
    """Sentences to train on, in no particular order, and sentences never to be trained on, the most everyday first."""

    training: list[str]
    heldout: list[str]


def unique(texts: Iterable[str]) -> list[str]:
    """Return sentences without duplicates: same words and same final question or exclamation mark."""
    first: dict[tuple[str, str], str] = {}
    for text in texts:
        first.setdefault((heldout_key(text), text[-1] if text[-1] in "?!" else ""), text)
    return list(first.values())


def make_corpus(synsets: Sequence[Synset], seed: int = 0) -> TextCorpus:
    rng = random.Random(seed)
    examples = unique(wordnet_examples(synsets))
    everything = unique(
        [
            *template_sentences(rng),
            *examples,
            *wordnet_definitions(synsets, rng),
            *wordnet_phrases(synsets, rng, words=14_000, phrases=8_000),
        ]
    )
    natural = sorted((text for text in examples if suits_heldout(text)), key=bucket)
    heldout = unique([*HELDOUT.splitlines(), *natural[:HELDOUT_EXAMPLES]])
    forbidden = {heldout_key(text) for text in heldout}
    training = [text for text in everything if not in_heldout_bucket(text) and heldout_key(text) not in forbidden]
    rng.shuffle(training)
    return TextCorpus(training, heldout)
