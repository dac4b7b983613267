"""Normalization by language, for models that read many: numbers, dates, times and money become words.

English has its own normalizer. German and French spell out what is written with digits and leave all other text as it
is. Numbers come from num2words, an optional dependency. All repetitions are bounded, so the time is linear.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from shoal.errors import MissingExtra
from shoal.text.normalize.english import normalize

Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]

START, END = r"(?<![\w.,/:-])", r"(?![\w/])(?![.,:]\d)"
MAX_DIGITS = 15  # longer numbers are read digit by digit
CURRENCY = "[€$£]"


@dataclass(frozen=True)
class Words:
    """Words of a language around numbers."""

    language: str
    decimal: str
    currencies: dict[str, str]  # the word, or `one|many`
    units: dict[str, str]
    one: str  # before a noun


GERMAN = Words(
    "de",
    "Komma",
    {"€": "Euro", "$": "Dollar", "£": "Pfund"},
    {
        "%": "Prozent", "‰": "Promille", "°C": "Grad Celsius",
        "°": "Grad", "km/h": "Kilometer pro Stunde", "km": "Kilometer",
        "cm": "Zentimeter", "mm": "Millimeter", "m²": "Quadratmeter",
        "m": "Meter", "kg": "Kilogramm", "g": "Gramm", "ml": "Milliliter",
        "l": "Liter", "Std.": "Stunde|Stunden", "Min.": "Minute|Minuten", "GB": "Gigabyte",
        "MB": "Megabyte",
    },
    "ein",
)  # fmt: skip
FRENCH = Words(
    "fr",
    "virgule",
    {"€": "euro|euros", "$": "dollar|dollars", "£": "livre|livres"},
    {
        "%": "pour cent", "°C": "degré Celsius|degrés Celsius", "°": "degré|degrés",
        "km/h": "kilomètre par heure|kilomètres par heure", "km": "kilomètre|kilomètres",
        "cm": "centimètre|centimètres", "mm": "millimètre|millimètres", "m²": "mètre carré|mètres carrés",
        "m": "mètre|mètres", "kg": "kilogramme|kilogrammes", "g": "gramme|grammes",
        "ml": "millilitre|millilitres", "l": "litre|litres", "min": "minute|minutes",
        "Go": "gigaoctet|gigaoctets", "Mo": "mégaoctet|mégaoctets",
    },
    "un",
)  # fmt: skip
GERMAN_MONTHS = (
    "Januar", "Februar", "März", "April", "Mai", "Juni", "Juli", "August", "September", "Oktober", "November",
    "Dezember",
)  # fmt: skip
FRENCH_MONTHS = (
    "janvier", "février", "mars", "avril", "mai", "juin", "juillet", "août", "septembre", "octobre", "novembre",
    "décembre",
)  # fmt: skip

GERMAN_NUMBER = r"(?:\d{1,3}(?:\.\d{3}){1,5}|\d{1,18})(?:,\d{1,18})?"
FRENCH_NUMBER = "(?:\\d{1,3}(?:[ \u00a0\u202f]\\d{3}(?!\\d)){1,5}|\\d{1,18})(?:,\\d{1,18})?"
# After these words a German ordinal ends in -en, after an article in -e, else in -er.
DATIVE = re.compile(r"\b(?:am|vom|zum|beim|dem|den|seit|bis|ab|im|des)\s$", re.IGNORECASE)
ARTICLE = re.compile(r"\b(?:der|die|das)\s$", re.IGNORECASE)


def normalize_german(text: str) -> str:
    """Return the text with numbers, dates, times and money in German words. Raises MissingExtra."""
    return _apply(german_rules(), text)


def normalize_french(text: str) -> str:
    """Return the text with numbers, dates, times and money in French words. Raises MissingExtra."""
    return _apply(french_rules(), text)


NORMALIZERS: dict[str, Callable[[str], str]] = {"en": normalize, "de": normalize_german, "fr": normalize_french}


@cache
def german_rules() -> tuple[Rule, ...]:
    month = "|".join(GERMAN_MONTHS)
    return (
        _rule(rf"{START}(\d{{1,2}})\.\s?(0?[1-9]|1[0-2])\.(?:\s?([12]\d{{3}}|\d\d)(?!\d))?", _german_date),
        _rule(rf"{START}(\d{{1,2}})\.(?=\s(?:{month})\b)", lambda match: _german_ordinal(match, int(match[1]))),
        _rule(rf"{START}([01]?\d|2[0-4]):([0-5]\d)(?:\sUhr)?(?!\d)", _german_time),
        _rule(rf"{START}(\d{{1,2}})(?=\sUhr\b)", lambda match: _hour(GERMAN, int(match[1]))),
        *_quantity_rules(GERMAN, GERMAN_NUMBER),
        _rule(rf"{START}(1[1-9]\d\d){END}", lambda match: _say("de", int(match[1]), "year")),
        *_number_rules(GERMAN, GERMAN_NUMBER),
    )


@cache
def french_rules() -> tuple[Rule, ...]:
    month = "|".join(FRENCH_MONTHS)
    return (
        _rule(rf"{START}(\d{{1,2}})/(0?[1-9]|1[0-2])(?:/([12]\d{{3}}|\d\d)(?!\d))?(?![\w/])", _french_date),
        _rule(rf"{START}1(?=\s(?:{month})\b)", lambda _: "premier"),
        _rule(r"(?<![\w.,])1(?:re|ère)\b", lambda _: "première"),
        _rule(r"(?<![\w.,])(\d{1,4})(?:er|e|ème|eme)\b", lambda match: _say("fr", int(match[1]), "ordinal")),
        _rule(rf"{START}([01]?\d|2[0-4])(?:\s?h\s?|:)([0-5]\d)(?![\w])", _french_time),
        _rule(rf"{START}([01]?\d|2[0-4])\s?h\b", lambda match: _french_hours(int(match[1]))),
        *_quantity_rules(FRENCH, FRENCH_NUMBER),
        *_number_rules(FRENCH, FRENCH_NUMBER),
    )


def _quantity_rules(words: Words, number: str) -> tuple[Rule, ...]:
    unit = "|".join(re.escape(each) for each in words.units)
    return (
        _rule(rf"{START}(?P<amount>{number})\s?(?P<sign>{CURRENCY})", partial(_money, words)),
        _rule(rf"(?P<sign>{CURRENCY})\s?(?P<amount>{number}){END}", partial(_money, words)),
        _rule(rf"{START}({number})\s?({unit})(?!\w)", partial(_unit, words)),
    )


def _number_rules(words: Words, number: str) -> tuple[Rule, ...]:
    return (
        _rule(rf"{START}1(?=\s[^\W\d_])", lambda _: words.one),
        _rule(rf"{START}({number}){END}", lambda match: _number(words, match[1])),
    )


def _apply(rules: tuple[Rule, ...], text: str) -> str:
    for pattern, speak in rules:
        text = pattern.sub(speak, text)
    return text


def _rule(pattern: str, speak: Callable[[re.Match[str]], str]) -> Rule:
    return re.compile(pattern), speak


def _number(words: Words, written: str) -> str:
    whole, _, decimals = re.sub("[. \u00a0\u202f]", "", written).partition(",")
    spoken = _digits(words, whole) if _is_code(whole) else _say(words.language, int(whole))
    return f"{spoken} {words.decimal} {_digits(words, decimals)}" if decimals else spoken


def _is_code(whole: str) -> bool:
    """Return whether a number is read digit by digit: postal codes, telephone numbers, account numbers."""
    return len(whole) > MAX_DIGITS or (len(whole) > 1 and whole[0] == "0")


def _digits(words: Words, digits: str) -> str:
    return " ".join(_say(words.language, int(digit)) for digit in digits)


def _count(words: Words, written: str) -> str:
    return words.one if written == "1" else _number(words, written)


def _money(words: Words, match: re.Match[str]) -> str:
    whole, _, cents = match["amount"].partition(",")
    one, many = _forms(words.currencies[match["sign"]])
    if cents and len(cents) != 2:
        return f"{_number(words, match['amount'])} {many}"
    spoken = f"{_count(words, whole)} {one if whole in ('0', '1') else many}"
    return spoken if cents in ("", "00") else f"{spoken} {_say(words.language, int(cents))}"


def _unit(words: Words, match: re.Match[str]) -> str:
    one, many = _forms(words.units[match[2]])
    return f"{_count(words, match[1])} {one if match[1] in ('0', '1') else many}"


def _forms(word: str) -> tuple[str, str]:
    one, _, many = word.partition("|")
    return one, many or one


def _german_date(match: re.Match[str]) -> str:
    day, month = _german_ordinal(match, int(match[1])), GERMAN_MONTHS[int(match[2]) - 1]
    return f"{day} {month}" + ("" if match[3] is None else f" {_say('de', int(match[3]), 'year')}")


def _german_ordinal(match: re.Match[str], day: int) -> str:
    before = match.string[max(match.start() - 8, 0) : match.start()]
    ending = "n" if DATIVE.search(before) else "" if ARTICLE.search(before) else "r"
    return _say("de", day, "ordinal") + ending


def _german_time(match: re.Match[str]) -> str:
    minute = int(match[2])
    return f"{_hour(GERMAN, int(match[1]))} Uhr" + (f" {_say('de', minute)}" if minute else "")


def _hour(words: Words, hour: int) -> str:
    return words.one if hour == 1 else _say(words.language, hour)


def _french_date(match: re.Match[str]) -> str:
    day = "premier" if int(match[1]) == 1 else _say("fr", int(match[1]))
    return f"{day} {FRENCH_MONTHS[int(match[2]) - 1]}" + ("" if match[3] is None else f" {_say('fr', int(match[3]))}")


def _french_time(match: re.Match[str]) -> str:
    minute = int(match[2])
    return _french_hours(int(match[1])) + (f" {_say('fr', minute)}" if minute else "")


def _french_hours(hour: int) -> str:
    return "une heure" if hour == 1 else f"{_say('fr', hour)} {'heures' if hour else 'heure'}"


def _say(language: str, number: int, form: str = "cardinal") -> str:
    try:
        from num2words import num2words  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("texts in German and French words need: pip install 'shoal-tts[languages]'") from None
    spoken: str = num2words(number, lang=language, to=form)
    return spoken
