"""`say-as` of SSML: spell characters and digits, and read ordinals, numbers, dates and telephone numbers as English."""

import re
from collections.abc import Callable

from shoal.errors import TextError
from shoal.text.normalize.months import MONTHS
from shoal.text.normalize.numbers import MAX_DIGITS, cardinal, digits, ordinal

SIGNS = {
    ".": "dot", ",": "comma", "-": "dash", "_": "underscore", "/": "slash", "@": "at", "#": "hash", "+": "plus",
    "*": "star", "&": "and", ":": "colon", "'": "apostrophe", "!": "exclamation mark", "?": "question mark",
}  # fmt: skip
DATE_FORMATS = ("mdy", "dmy", "ymd", "ydm", "md", "dm", "ym", "my", "d", "m", "y")
DATE_PARTS = re.compile(r"\d{1,4}")
MAX_CHARACTERS = 200


def say_as(text: str, interpret_as: str, format: str = "") -> str:
    """Return the reading of a text. Raises TextError for an unknown interpretation, or a text that does not fit it."""
    if interpret_as not in READINGS:
        raise TextError(f"say-as cannot interpret {interpret_as[:32]!r}: use {', '.join(READINGS)}")
    if len(text) > MAX_CHARACTERS:
        raise TextError(f"say-as takes at most {MAX_CHARACTERS} characters, not {len(text)}")
    return READINGS[interpret_as](text.strip(), format)


def _characters(text: str, _: str) -> str:
    return " ".join(_character(each) for each in text if not each.isspace())


def _character(character: str) -> str:
    if character.isascii() and character.isdigit():
        return digits(character)
    return SIGNS.get(character, character.upper())


def _digits(text: str, _: str) -> str:
    found = "".join(each for each in text if each.isascii() and each.isdigit())
    if not found:
        raise TextError(f"{text[:32]!r} has no digits")
    return digits(found)


def _ordinal(text: str, _: str) -> str:
    return ordinal(_number(text))


def _cardinal(text: str, _: str) -> str:
    return cardinal(_number(text))


def _number(text: str) -> int:
    plain = text.replace(",", "").replace(" ", "")
    plain = re.sub("(?i)(?:st|nd|rd|th)$", "", plain)
    if not (plain.isascii() and plain.isdigit()) or len(plain) > MAX_DIGITS:
        raise TextError(f"{text[:32]!r} is not a whole number of at most {MAX_DIGITS} digits")
    return int(plain)


def _date(text: str, format: str) -> str:
    """Return `March 5, 2024`, which every model reads; the order of the parts is that of the format."""
    parts = DATE_PARTS.findall(text)
    order = format or ("ymd" if parts and len(parts[0]) == 4 else "mdy")
    if order not in DATE_FORMATS or len(order) != len(parts):
        raise TextError(f"{text[:32]!r} does not fit the date format {order!r}: use {', '.join(DATE_FORMATS)}")
    value = dict(zip(order, map(int, parts), strict=True))
    if not (1 <= value.get("m", 1) <= 12 and 1 <= value.get("d", 1) <= 31):
        raise TextError(f"{text[:32]!r} is not a date in the format {order!r}")
    month, year = MONTHS[value["m"] - 1] if "m" in value else "", str(value.get("y", ""))
    if "d" not in value:
        return f"{month} {year}".strip()
    day = f"{month} {value['d']}" if month else f"the {ordinal(value['d'])}"
    return f"{day}, {year}" if year else day


def _telephone(text: str, _: str) -> str:
    groups = re.findall(r"\+?\d+", text)
    if not groups:
        raise TextError(f"{text[:32]!r} has no digits")
    spoken = (("plus " if group[0] == "+" else "") + digits(group.lstrip("+")) for group in groups)
    return ", ".join(spoken)


READINGS: dict[str, Callable[[str, str], str]] = {
    "characters": _characters,
    "spell-out": _characters,
    "digits": _digits,
    "ordinal": _ordinal,
    "cardinal": _cardinal,
    "number": _cardinal,
    "date": _date,
    "telephone": _telephone,
}
