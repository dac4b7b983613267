r"""Pauses in plain text: `[pause:0.8s]` and `<break time="800ms"/>`. A backslash escapes a bracket: `\[whisper]`."""

import re
from collections.abc import Iterator

from shoal.errors import TextError
from shoal.text.markup.segments import MAX_PAUSE_SECONDS, Passage, Pause, Segment

PAUSE = re.compile(
    r"(?<!\\)(?:\[pause:(?P<bracket>[^\[\]\n]{0,32})\]|<break(?P<attributes>(?:\s[^<>]{0,100})?/?)>(?:</break>)?)"
)
ATTRIBUTES = re.compile(r"""\s+(time|strength)\s?=\s?(?:"([^"<>]{0,32})"|'([^'<>]{0,32})')""")
TIME = re.compile(r"\s{0,4}\+?(\d{1,6}(?:\.\d{1,6})?|\.\d{1,6})\s?(ms|s)\s{0,4}")
# Seconds of a pause, by SSML's name of its strength.
STRENGTHS = {"none": 0.0, "x-weak": 0.1, "weak": 0.25, "medium": 0.5, "strong": 1.0, "x-strong": 1.5}
# Escaped brackets are removed and their words are kept: a model that knows style tags would read them as a tag.
ESCAPED = re.compile(r"\\[\[(]([^\[\]()\\\n]{0,200})\\?[\])]")


def parse_pauses(text: str) -> list[Segment]:
    """Return the passages and pauses of a plain text. Raises TextError for a pause that is not one."""
    if "[pause:" in text or "<break" in text:
        return list(_segments(text))
    return [Passage(text)] if text else []


def unescape(text: str) -> str:
    r"""Return the text with the words of `\[escaped]` brackets and parentheses instead of the brackets."""
    return ESCAPED.sub(r"\1", text) if "\\" in text else text


def seconds_of(time: str) -> float:
    """Return the seconds of `800ms` or `0.8s`. Raises TextError."""
    match = TIME.fullmatch(time)
    if match is None:
        raise TextError(f"{time[:32]!r} is not a duration: write 0.8s or 800ms")
    seconds = float(match[1]) / (1000.0 if match[2] == "ms" else 1.0)
    if seconds > MAX_PAUSE_SECONDS:
        raise TextError(f"a pause of {seconds:g} s is too long: the limit is {MAX_PAUSE_SECONDS:g} s")
    return seconds


def break_seconds(attributes: dict[str, str]) -> float:
    """Return the seconds of a `break` element: its time, else its strength, else medium. Raises TextError."""
    unknown = sorted(set(attributes) - {"time", "strength"})
    if unknown:
        raise TextError(f"break has no attribute {unknown[0][:32]!r}: use time or strength")
    if "time" in attributes:
        return seconds_of(attributes["time"])
    strength = attributes.get("strength", "medium")
    if strength not in STRENGTHS:
        raise TextError(f"{strength[:32]!r} is not a strength: use {', '.join(STRENGTHS)}")
    return STRENGTHS[strength]


def _segments(text: str) -> Iterator[Segment]:
    start = 0
    for match in PAUSE.finditer(text):
        if match.start() > start:
            yield Passage(text[start : match.start()])
        yield Pause(_seconds(match))
        start = match.end()
    if start < len(text):
        yield Passage(text[start:])


def _seconds(match: re.Match[str]) -> float:
    try:
        if match["bracket"] is not None:
            return seconds_of(match["bracket"])
        written = match["attributes"].removesuffix("/").rstrip()
        found = {each[1]: each[2] or each[3] or "" for each in ATTRIBUTES.finditer(written)}
        if ATTRIBUTES.sub("", written).strip():
            raise TextError("break takes the attributes time and strength, in quotes")
        return break_seconds(found)
    except TextError as problem:
        raise TextError(f"{match[0][:60]}: {problem}") from None
