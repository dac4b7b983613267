"""Chapter and verse: "Psalm 23:4" is "Psalm twenty-three four", neither a ratio nor a time."""

import re

from shoal.text.normalize.numbers import cardinal
from shoal.text.normalize.prefilter import DIGITS, Prefiltered

BOOKS = (
    *("Genesis", "Exodus", "Leviticus", "Numbers", "Deuteronomy", "Joshua", "Judges", "Ruth", "Samuel", "Kings"),
    *("Chronicles", "Ezra", "Nehemiah", "Esther", "Job", "Psalms", "Proverbs", "Ecclesiastes", "Isaiah", "Jeremiah"),
    *("Lamentations", "Ezekiel", "Daniel", "Hosea", "Joel", "Amos", "Obadiah", "Jonah", "Micah", "Nahum", "Habakkuk"),
    *("Zephaniah", "Haggai", "Zechariah", "Malachi", "Matthew", "Mark", "Luke", "John", "Acts", "Romans"),
    *("Corinthians", "Galatians", "Ephesians", "Philippians", "Colossians", "Thessalonians", "Timothy", "Titus"),
    *("Philemon", "Hebrews", "James", "Peter", "Jude", "Revelation", "Psalm", "Song", "Songs", "Solomon", "Sirach"),
    *("Wisdom", "Tobit", "Judith", "Baruch", "Maccabees", "Nephi", "Alma", "Surah", "Sura", "Quran", "Gita"),
)
FULL_NAMES = frozenset(BOOKS)
ORDINALS = {"1": "First ", "2": "Second ", "3": "Third ", "I": "First ", "II": "Second ", "III": "Third "}
NUMBERED_BOOKS = frozenset(
    ("Samuel", "Kings", "Chronicles", "Corinthians", "Thessalonians", "Timothy", "Peter", "John", "Maccabees", "Nephi")
)
# A verse never begins with a zero, and no "p.m." follows: "John 3:05 p.m." is an appointment.
VERSE = Prefiltered(
    r"\b(?:([1-3]|I{1,3})\s)?([A-Z][a-z]{1,14})(\.?)\s(\d{1,3}):([1-9]\d{0,2})"
    r"(?:\s?-\s?(\d{1,3})(?::(\d{1,3}))?)?(?![\d:])(?!\s?[AaPp]\.?[Mm]\b)",
    all_of=":",
    any_of=DIGITS,
)


def speak_verses(text: str) -> str:
    """Return the text with chapter and verse of a book of scripture as words; other numbers stay."""
    return VERSE.sub(_verse, text)


def _verse(match: re.Match[str]) -> str:
    number, written, dot, chapter, verse, *last = match.groups()
    book = _book(written, abbreviated=bool(dot))
    if book is None:
        return match[0]
    numbered = ORDINALS[number] if number and book in NUMBERED_BOOKS else f"{number} " if number else ""
    to = [cardinal(int(each)) for each in last if each]
    return f"{numbered}{book} {cardinal(int(chapter))} {cardinal(int(verse))}" + (f" to {' '.join(to)}" if to else "")


def _book(written: str, *, abbreviated: bool) -> str | None:
    """Return the name of a book: written in full, or with a dot as its beginning, as in "Rom." and "Matt."."""
    if written in FULL_NAMES:
        return written
    if written in ("Ps", "Pss"):
        return "Psalm"
    if not abbreviated or len(written) < 3:
        return None
    return next((book for book in BOOKS if book.startswith(written)), None)
