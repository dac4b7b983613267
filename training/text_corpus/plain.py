"""Convert written forms to plain spoken words, and check that a sentence of the corpus has only those."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from training.text_corpus.numbers import decade_words, digits_words, number_words, ordinal_words, year_words

MIN_CHARACTERS, MAX_CHARACTERS = 2, 160
SPOKEN = {
    r"\be\.g\.": "for example",
    r"\bi\.e\.": "that is",
    r"\betc\b\.?": "et cetera",
    r"\bvs\b\.?": "versus",
    r"\bca?\. (?=\d)": "about ",
    r"\bMr\.": "Mister",
    r"\bMrs\.": "Missus",
    r"\bDr\.": "Doctor",
    r"\bSt\. (?=[A-Z])": "Saint ",
    r"\bProf\.": "Professor",
    r"\bNo\. (?=\d)": "number ",
    r"&": " and ",
    r"(?<=\d) ?%": " percent",
    r"(?<=\d) ?-(?=\d)": " to ",
    r"--| - ": ", ",
    r"`": "'",
    r"[\u2018\u2019]": "'",
    r"[\u201c\u201d]": '"',
}
PLAIN = re.compile(r"[A-Za-z .,?!'\"\-;:]+")
# Capitals, initials and lone letters: one teacher spells them, another tries to say them as a word.
SPELLED = re.compile(r"\b[A-Z]{2,}|(?<![A-Za-z'])[b-zB-HJ-Z](?![A-Za-z'])|[A-Za-z]\.[A-Za-z]|[a-z][A-Z]")
AMBIGUOUS_NUMBER = re.compile(r"\d[:/]\d")


def spell_numbers(text: str) -> str:
    """Spell digits with an unambiguous reading: years, decades, ordinals, whole and decimal numbers."""
    text = re.sub(r"\b(1[1-9]\d0|20[0-9]0)'?s\b", lambda m: decade_words(int(m[1])), text)
    text = re.sub(r"\b(\d{1,3})(?:st|nd|rd|th)\b", lambda m: ordinal_words(int(m[1])), text)
    text = re.sub(r"\$(\d{1,6})\b(?![.,]\d)", lambda m: f"{number_words(int(m[1]))} dollars", text)
    text = re.sub(r"\b\d{1,3}(?:,\d{3})+\b", lambda m: number_words(int(m[0].replace(",", ""))), text)
    text = re.sub(r"\b(1[1-9]\d\d|20\d\d)\b(?![.,]\d)", lambda m: year_words(int(m[1])), text)
    text = re.sub(r"\b(\d{1,4})\.(\d{1,4})\b", lambda m: f"{number_words(int(m[1]))} point {digits_words(m[2])}", text)
    return re.sub(r"\b\d{1,4}\b", lambda m: number_words(int(m[0])), text)


def normalise(text: str) -> str | None:
    """Return the sentence in plain spoken words, or None if its reading is ambiguous."""
    text = re.sub(r"\([^()]*\)", " ", text)
    for written, spoken in SPOKEN.items():
        text = re.sub(written, spoken, text)
    if AMBIGUOUS_NUMBER.search(text):
        return None
    text = spell_numbers(text)
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r" (?=[.,?!;:])", "", text)
    text = re.sub(r"([,;:])[,;:]+", r"\1", text).strip(" ,;:-")
    return text if is_plain(text) and not SPELLED.search(text) else None


def normalised(texts: Iterable[str]) -> Iterator[str]:
    return (text for text in map(normalise, texts) if text is not None)


def is_plain(text: str) -> bool:
    """Return whether the text has the length and the letters of a sentence for the corpus."""
    if not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
        return False
    return bool(PLAIN.fullmatch(text) and re.search("[A-Za-z]", text)) and ".." not in text and text.count('"') % 2 == 0


def as_sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")
