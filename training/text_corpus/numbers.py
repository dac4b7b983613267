"""Numbers as English words."""

from __future__ import annotations

import re

SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SCALES = ((1_000_000_000, "billion"), (1_000_000, "million"), (1_000, "thousand"))
IRREGULAR_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}


def number_words(number: int, joiner: str = " ") -> str:
    """English words for 0 <= number < 10**12; `joiner` stands after the hundreds, " and " in British usage."""
    if number < 20:
        return SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens] + (f"-{SMALL[ones]}" if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{SMALL[hundreds]} hundred" + (joiner + number_words(rest, joiner) if rest else "")
    scale, name = next((scale, name) for scale, name in SCALES if number >= scale)
    count, rest = divmod(number, scale)
    return f"{number_words(count, joiner)} {name}" + (f" {number_words(rest, joiner)}" if rest else "")


def ordinal_words(number: int) -> str:
    head, last = re.fullmatch(r"(.*?)([a-z]+)", number_words(number)).groups()  # type: ignore[union-attr]
    if last in IRREGULAR_ORDINALS:
        return f"{head}{IRREGULAR_ORDINALS[last]}"
    return f"{head}{last[:-1]}ieth" if last.endswith("y") else f"{head}{last}th"


def year_words(year: int) -> str:
    """A year as it is read aloud: nineteen oh five, two thousand six, twenty twenty-six."""
    century, rest = divmod(year, 100)
    if 2000 <= year < 2010:
        return number_words(year)
    if not rest:
        return f"{number_words(century)} hundred"
    return f"{number_words(century)} {'oh ' if rest < 10 else ''}{number_words(rest)}"


def decade_words(decade: int) -> str:
    century, rest = divmod(decade, 100)
    return f"{number_words(century)} {TENS[rest // 10][:-1]}ies" if rest >= 20 else f"{number_words(century)} hundreds"


def digits_words(digits: str) -> str:
    return " ".join(SMALL[int(digit)] for digit in digits)
