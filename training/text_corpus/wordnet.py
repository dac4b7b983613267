"""Read definitions, examples and words of WordNet."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from training.text_corpus.plain import as_sentence, normalised

WORDNET = Path("/usr/share/wordnet")
# Glosses mark such entries in these words; they are left out.
UNPLEASANT = re.compile(r"\b(slurs?|offensive|vulgar|obscene|disparag\w+|derogatory|profane|sexual\w*|prostitut\w*)\b")
PERSONAL = "I|I'm|I'll|I've|he|she|they|we|you|it|don't|please"
PERSONAL_OPENING = re.compile(rf"({PERSONAL})\b", re.I)
NATURAL_OPENING = re.compile(rf"({PERSONAL}|the|my|his|her|our|their|this|that|there)\b", re.I)


@dataclass(frozen=True, slots=True)
class Synset:
    """One WordNet entry: the words that share a meaning, its definitions and examples, all as written there."""

    lemmas: tuple[str, ...]
    definitions: tuple[str, ...]
    examples: tuple[str, ...]


def parse_synset(line: str) -> Synset:
    """Parse one line of a `data.*` file in the format of wndb(5)."""
    fields, _, gloss = line.partition(" | ")
    numbered = fields.split()
    count = int(numbered[3], 16)
    lemmas = tuple(re.sub(r"\(\w+\)$", "", lemma).replace("_", " ") for lemma in numbered[4 : 4 + 2 * count : 2])
    # A dash after the closing quote names an author: those are quotations, not the editors' examples.
    quoted = re.findall(r'"([^"]*)"(\s*-)?', gloss)
    definitions = re.sub(r'"[^"]*"(\s*-[^;]*)?', ";", gloss).split(";")
    return Synset(
        lemmas, tuple(filter(None, map(str.strip, definitions))), tuple(q for q, author in quoted if not author)
    )


def read_synsets(folder: Path) -> list[Synset]:
    synsets: list[Synset] = []
    for part in ("noun", "verb", "adj", "adv"):
        lines = (folder / f"data.{part}").read_text(encoding="ascii", errors="replace").splitlines()
        synsets += [parse_synset(line) for line in lines if not line.startswith("  ") and not UNPLEASANT.search(line)]
    return synsets


def wordnet_examples(synsets: Iterable[Synset]) -> Iterator[str]:
    """Return the examples; sentences get a capital and a full stop, phrases stay as they are."""
    for text in normalised(example for synset in synsets for example in synset.examples):
        yield as_sentence(text) if NATURAL_OPENING.match(text) and " " in text else text


def wordnet_definitions(synsets: Iterable[Synset], rng: random.Random) -> Iterator[str]:
    """Return the definitions, half of them as sentences: people type both ways."""
    for text in normalised(definition for synset in synsets for definition in synset.definitions):
        yield as_sentence(text) if rng.random() < 0.5 else text


def wordnet_phrases(synsets: Iterable[Synset], rng: random.Random, words: int, phrases: int) -> Iterator[str]:
    """Return single words and set phrases, lower-case lemmas only: readings of names vary too much."""
    lemmas = sorted(
        {lemma for synset in synsets for lemma in synset.lemmas if re.fullmatch("[a-z][a-z ]{2,28}", lemma)}
    )
    single = [lemma for lemma in lemmas if " " not in lemma]
    several = [lemma for lemma in lemmas if " " in lemma]
    for lemma in [*rng.sample(single, min(words, len(single))), *rng.sample(several, min(phrases, len(several)))]:
        yield rng.choice((lemma, lemma.capitalize(), as_sentence(lemma), f"the {lemma}", f"{lemma.capitalize()}?"))
