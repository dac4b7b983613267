"""Generated sentences: templates whose {slots} are filled at random, and single words."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from training.text_corpus.files import own_sentences
from training.text_corpus.fillers import FILLERS
from training.text_corpus.plain import is_plain

TEMPLATES = (
    (own_sentences("everyday"), 34_000),
    (own_sentences("questions"), 26_000),
    (own_sentences("numbers"), 7_000),
    (own_sentences("dates"), 4_000),
    (own_sentences("times"), 2_500),
    (own_sentences("money"), 3_000),
    (own_sentences("names"), 24_000),
    (own_sentences("greetings"), 1_500),
    (own_sentences("phrases"), 5_000),
    (own_sentences("exclamations"), 6_000),
    (own_sentences("dialogue"), 14_000),
    (own_sentences("short_lines"), 9_000),
    (own_sentences("lists"), 26_000),
    (own_sentences("conversation"), 16_000),
    (own_sentences("answers"), 8_000),
)
ONE_WORD = own_sentences("one_word").splitlines()


def fill(template: str, rng: random.Random) -> str:
    """Return the template with every slot filled; capitalised if the template is a sentence."""

    def choose(match: re.Match[str]) -> str:
        filler = FILLERS[match[1]]
        return filler(rng) if callable(filler) else rng.choice(filler)

    text = re.sub(r"\{(\w+)\}", choose, template)
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return text[0].upper() + text[1:] if template[-1] in ".?!," else text


def fill_all(templates: str, count: int, rng: random.Random) -> Iterator[str]:
    """Return `count` filled templates in turn; the caller drops duplicates."""
    choices = templates.splitlines()
    return (fill(choices[turn % len(choices)], rng) for turn in range(count))


def template_sentences(rng: random.Random) -> Iterator[str]:
    for templates, count in TEMPLATES:
        yield from filter(is_plain, fill_all(templates, count, rng))
    for word in ONE_WORD:
        yield from (word, f"{word}.", f"{word}!", f"{word}?")
