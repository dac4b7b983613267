"""Fillers of the slots of templates: lists of words/, by file name, or functions of the random generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from training.text_corpus.files import word_lists
from training.text_corpus.numbers import digits_words, number_words, ordinal_words, year_words

WORDS = word_lists()


LETTERS = list("BCDEFGHJKLMNOPQRSTUVWXYZ")


def any_number(rng: random.Random) -> int:
    """Return a number of one to seven digits, each length equally likely."""
    digits = rng.randint(1, 7)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def spoken_number(rng: random.Random) -> str:
    return number_words(any_number(rng), rng.choice((" ", " and ")))


def spoken_date(rng: random.Random) -> str:
    month, day = rng.choice(WORDS["month"]), ordinal_words(rng.randint(1, 31))
    return rng.choice((f"{month} {day}", f"the {day} of {month}", f"{rng.choice(WORDS['day'])}, {month} {day}"))


def spoken_time(rng: random.Random) -> str:
    hour, minute = number_words(rng.randint(1, 12)), rng.randint(1, 29)
    past = f"{rng.choice(('quarter', 'half', 'ten', 'twenty', number_words(minute) + ' minutes'))} past {hour}"
    to = f"{rng.choice(('quarter', 'five', 'twenty'))} to {hour}"
    digital = f"{hour} {rng.choice(('fifteen', 'thirty', 'forty-five', 'oh five', number_words(minute + 30)))}"
    part = rng.choice((" in the morning", " in the afternoon", " at night", "", "", ""))
    return rng.choice((f"{hour} o'clock", past, to, digital)) + part


def plural(count: int, one: str, many: str) -> str:
    return f"{number_words(count)} {one if count == 1 else many}"


def spoken_money(rng: random.Random) -> str:
    one, many, cent = rng.choice(
        (("dollar", "dollars", "cents"), ("pound", "pounds", "pence"), ("euro", "euros", "cents"))
    )
    whole = plural(max(1, any_number(rng) % 10 ** rng.randint(1, 5)), one, many)
    return f"{whole} and {number_words(rng.randint(2, 99))} {cent}" if rng.random() < 0.4 else whole


def spoken_phone(rng: random.Random) -> str:
    groups = rng.choice(((3, 4), (3, 3, 4), (5, 6), (2, 2, 2, 2)))
    return ", ".join(digits_words("".join(rng.choice("0123456789") for _ in range(size))) for size in groups)


# A list, not any sequence: a string is a sequence too, and its single letters would be filled in.
Filler = list[str] | Callable[[random.Random], str]
FILLERS: Mapping[str, Filler] = {
    **WORDS,
    "full": lambda rng: f"{rng.choice(WORDS['person'])} {rng.choice(WORDS['last'])}",
    "n": spoken_number,
    "few": lambda rng: number_words(rng.randint(2, 99)),
    "nth": lambda rng: ordinal_words(rng.randint(1, 120)),
    "year": lambda rng: year_words(rng.randint(1100, 2060)),
    "date": spoken_date,
    "time": spoken_time,
    "money": spoken_money,
    "phone": spoken_phone,
    "decimal": lambda rng: f"{number_words(rng.randint(0, 99))} point {digits_words(str(rng.randint(1, 99)))}",
    "letters": lambda rng: ", ".join(rng.sample(LETTERS, rng.randint(2, 5))),
}
