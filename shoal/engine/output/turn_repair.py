"""Divide a turn that stopped too early into what was spoken and the rest, which becomes a turn of its own."""

import re

from shoal.audio.guard import EDGE_SECONDS, reading_seconds
from shoal.audio.guard import MARKER as STYLE
from shoal.text.clean import has_words
from shoal.text.phonemes import SPAN
from shoal.text.split import MARKER, TAG
from shoal.text.tokenizer import SPEAKER_TAG

WIDE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # kana, ideographs, hangul: a text may be cut between any two
# Parts that are never cut: phoneme spans, tags, markers, single wide characters, words; each with its trailing space.
UNIT = re.compile(rf"(?:{SPAN.pattern}|{TAG}|{MARKER}|[{WIDE}][^\w\s]*|[^\s{WIDE}]+)\s*")


def divide_text(text: str, seconds: float, pace: float) -> tuple[str, str] | None:
    """Return the part of a text that `seconds` of speech contain, and the rest; None if one of them has no word.

    The cut follows from the reading time of the words, because there is no alignment. The estimate is low: a word that
    is spoken twice is better than one that is left out.
    """
    cut = _cut(text, seconds, pace)
    spoken, rest = text[:cut].rstrip(), text[cut:].strip()
    if not (has_words(SPEAKER_TAG.sub("", spoken)) and has_words(SPEAKER_TAG.sub("", rest))):
        return None
    speakers = [] if SPEAKER_TAG.match(rest) else SPEAKER_TAG.findall(spoken)
    return spoken, "".join((*speakers[-1:], rest))


def _cut(text: str, seconds: float, pace: float) -> int:
    """Return the index after the last word that ends within `seconds`; tags belong to the words after them."""
    left, end = seconds - EDGE_SECONDS, 0
    for unit in UNIT.finditer(text):
        reading = reading_seconds(STYLE.sub(" ", unit[0])) * pace
        left -= reading
        if left < 0:
            break
        end = unit.end() if reading else end
    return end
