"""Held-out sentences: never trained on, for measuring intelligibility."""

from __future__ import annotations

import hashlib
import re

from training.text_corpus.files import own_sentences
from training.text_corpus.wordnet import PERSONAL_OPENING

HELDOUT = own_sentences("heldout")


HELDOUT_EXAMPLES = 90
HELDOUT_SHARE = 0.01
HELDOUT_WORDS = range(6, 15)


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.casefold())


def heldout_key(text: str) -> str:
    """Return the key by which two sentences count as the same: their words, without case and punctuation."""
    return " ".join(words_of(text))


def bucket(text: str) -> float:
    """Return a number in [0, 1) that depends only on the words."""
    digest = hashlib.blake2b(heldout_key(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def in_heldout_bucket(text: str) -> bool:
    return bucket(text) < HELDOUT_SHARE


def suits_heldout(text: str) -> bool:
    """Return whether an example is conversational and held out."""
    return bool(PERSONAL_OPENING.match(text)) and len(words_of(text)) in HELDOUT_WORDS and in_heldout_bucket(text)
