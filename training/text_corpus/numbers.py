"""Spell numbers as English words: as the engine does, and in forms that only the corpus has."""

from __future__ import annotations

import re

from shoal.text.normalize.numbers import below_hundred, cardinal, plural
from shoal.text.normalize.numbers import digits as digits_words
from shoal.text.normalize.numbers import ordinal as ordinal_words
from shoal.text.normalize.numbers import year as year_words

__all__ = ["decade_words", "digits_words", "number_words", "ordinal_words", "year_words"]

AFTER_HUNDREDS = re.compile(r"(?<=hundred) (?!thousand|million|billion)")


def number_words(number: int, joiner: str = " ") -> str:
    """Return English words for 0 <= number < 10**12; `joiner` stands after the hundreds, " and " in British usage."""
    return AFTER_HUNDREDS.sub(joiner, cardinal(number))


def decade_words(decade: int) -> str:
    century, rest = divmod(decade, 100)
    return f"{cardinal(century)} {plural(below_hundred(rest)) if rest >= 20 else 'hundreds'}"
