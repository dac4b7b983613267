"""Split long texts into turns that a model speaks one after the other.

`split_dialogue` is S2's rule for dialogue. `split_text` is for prose: it cuts at sentence ends, then at clause marks,
then at spaces, and inside a word only as a last resort. Numbers, style markers and speaker tags are never cut.
All patterns have bounded repetition or scan disjoint spans, so the time is linear in the length of any text.
"""

import re
from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import pairwise

from shoal.errors import InvalidRequest
from shoal.text.clean import has_words
from shoal.text.tokenizer import SPEAKER_TAG

LINES_PER_TURN = 5

Span = tuple[int, int]


class Break(IntEnum):
    """Kinds of places where a text may be cut, best first."""

    SENTENCE = 0
    CLAUSE = 1
    SPACE = 2
    ANYWHERE = 3


# Lengths are bounded, so that a page of text in brackets is not a marker and a thousand digits are not a number.
TAG = r"<\|speaker:[0-9]{1,9}\|>"
MARKER = r"\([^()\[\]\r\n]{1,64}\)|\[[^()\[\]\r\n]{1,64}\]"
NUMBER = r"[$€£¥]?\d{1,32}(?:(?:[.,:/'’–-]|[ \u00a0\u202f](?=\d{3}(?!\d)))\d{1,32}){0,8}[%‰°]?[A-Za-z]{0,3}"
WHOLE = f"{TAG}|{MARKER}|{NUMBER}"

CLOSERS = "\"'”’»)]}」』）】》"
OPENERS = "\"'“‘(["
ENDERS = tuple(".!?…؟۔।።။")
CLAUSE_MARKS = tuple(",;:—–،؛")
# Chinese and Japanese have no space after a mark, so the text is cut after the mark itself.
WIDE_ENDERS = "。！？｡"
WIDE_CLAUSE_MARKS = "，、；："
PLACE = re.compile(
    f"(?P<whole>{WHOLE})|(?P<wide_end>[{WIDE_ENDERS}]+[{re.escape(CLOSERS)}]*)\\s*"
    f"|(?P<wide_clause>[{WIDE_CLAUSE_MARKS}]+)\\s*|(?P<space>\\s+)"
)
LOOK_BACK = 24

ABBREVIATION = re.compile(
    "mr|mrs|ms|mx|dr|prof|rev|hon|st|sr|jr|gen|col|capt|cpt|lt|sgt|maj|cmdr|gov|sen|rep|pres|supt"
    "|vs|etc|cf|al|approx|dept|est|inc|ltd|co|corp|bros|jan|feb|apr|jun|jul|aug|sept|oct|nov|dec|ave|blvd|rd|mt|ft|viz"
    # e.g, i.e, U.S, Ph.D, and initials
    r"|(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,2}|[^\W\d_]",
    re.IGNORECASE,
)
# Abbreviations only before a number ("No. 5", "Fig. 3"); otherwise these are words or ends of words.
ABBREVIATION_OF_NUMBER = re.compile("nos?|figs?|vols?|pp?|ch|sec|eq|art", re.IGNORECASE)
LIST_NUMBER = re.compile(r"\d{1,3}")


def split_dialogue(text: str, max_bytes: int, *, drop_lead_in: bool = False) -> list[str]:
    """Split a dialogue into S2's turns: at most five speaker lines and `max_bytes` of UTF-8 each.

    A speaker line is never cut, so a long one exceeds `max_bytes`; text without a speaker tag is one turn. Words before
    the first tag are assigned to speaker 0; upstream drops them, and so does `drop_lead_in`, for parity.
    """
    lines = list(speaker_lines(text, drop_lead_in))
    if not lines:
        return [text]
    turns: list[list[str]] = [[]]
    size = 0
    for line in lines:
        line_size = len(line.encode())
        if turns[-1] and (len(turns[-1]) == LINES_PER_TURN or size + line_size > max_bytes):
            turns.append([])
            size = 0
        turns[-1].append(line)
        size += line_size
    return ["\n".join(turn) for turn in turns]


def speaker_lines(text: str, drop_lead_in: bool) -> Iterator[str]:
    """Yield each tag with the words after it; skip a tag without words, for which a model would invent some."""
    tags = list(SPEAKER_TAG.finditer(text))
    if not tags:
        return
    lead_in = text[: tags[0].start()].strip()
    if lead_in and not drop_lead_in:
        yield f"<|speaker:0|>{lead_in}"
    ends = [tag.start() for tag in tags[1:]] + [len(text)]
    for tag, end in zip(tags, ends, strict=True):
        if text[tag.end() : end].strip():
            yield text[tag.start() : end].strip()


def split_text(text: str, max_bytes: int) -> list[str]:
    """Split prose into turns of at most `max_bytes` of UTF-8; joined, they are the text up to whitespace.

    A turn exceeds the limit only if a single number, marker, tag or grapheme does, or if it absorbed a neighbour
    without words (`...`, `!!`), which cannot be spoken alone.
    """
    if max_bytes < 1:
        raise InvalidRequest(f"a turn of {max_bytes} bytes has no space for text: use at least 1")
    spans = divide(text, (0, len(text)), Break.SENTENCE, max_bytes)
    return [text[start:end] for start, end in attach_wordless(text, spans)]


def split_sentences(text: str, max_bytes: int, min_letters: int = 0) -> list[str]:
    """Split prose like `split_text`, but never put two sentences of at least `min_letters` letters into one turn.

    For small models, which leave out sentences inside a longer turn, but speak one or two words alone less clearly.
    """
    places = (place for place, found in breaks(text, 0, len(text)) if found is Break.SENTENCE)
    sentences = pairwise((0, *places, len(text)))
    spans = (each for sentence in sentences for each in divide(text, sentence, Break.CLAUSE, max_bytes))
    turns = join_short(text, attach_wordless(text, spans), min_letters, max_bytes)
    return [text[start:end] for start, end in turns]


def join_short(text: str, spans: Iterable[Span], min_letters: int, max_bytes: int) -> list[Span]:
    """Join spans of fewer than `min_letters` letters with the next one, if they fit.

    The last one stays alone: nano left out two of those that ended a longer turn (of 300 texts), where the guard
    against turns that are too short does not see it.
    """
    joined: list[Span] = []
    for start, end in spans:
        if joined and letters(text, joined[-1]) < min_letters and size_of(text, joined[-1][0], end) <= max_bytes:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def letters(text: str, span: Span) -> int:
    return sum(map(str.isalpha, text[span[0] : span[1]]))


def divide(text: str, span: Span, level: Break, max_bytes: int) -> list[Span]:
    """Return trimmed spans, cut at breaks of `level` or better; longer spans are cut at lower levels."""
    start, end = trim(text, span)
    if size_of(text, start, end) <= max_bytes:
        return [(start, end)] if start < end else []
    if level is Break.ANYWHERE:
        return pack(text, units(text, start, end), max_bytes)
    cuts = [start, *(place for place, found in breaks(text, start, end) if found <= level), end]
    smaller = (each for part in pairwise(cuts) for each in divide(text, part, Break(level + 1), max_bytes))
    return pack(text, smaller, max_bytes)


def pack(text: str, spans: Iterable[Span], max_bytes: int) -> list[Span]:
    """Join adjacent spans from left to right while they fit, including the text between them."""
    packed: list[Span] = []
    size = 0
    for start, end in spans:
        grown = size + size_of(text, packed[-1][1], end) if packed else 0
        if packed and grown <= max_bytes:
            packed[-1] = (packed[-1][0], end)
            size = grown
        else:
            packed.append((start, end))
            size = size_of(text, start, end)
    return packed


def attach_wordless(text: str, spans: Iterable[Span]) -> list[Span]:
    """Join a span without a letter or digit to the span before it; at the start, to the one after it."""
    joined: list[Span] = []
    last_has_words = True
    for start, end in spans:
        spoken = has_words(text[start:end])
        if joined and not (spoken and last_has_words):
            joined[-1] = (joined[-1][0], end)
            last_has_words |= spoken
        else:
            joined.append((start, end))
            last_has_words = spoken
    return joined


def breaks(text: str, start: int, end: int) -> Iterator[tuple[int, Break]]:
    """Yield every position between `start` and `end` where a cut is possible, with its kind."""
    after_whole = start
    for match in PLACE.finditer(text, start, end):
        if match.lastgroup == "whole":
            # A marker or a tag stays with the words after it.
            after_whole = match.end() if match[0][-1] in ")]>" else start
        elif match.lastgroup != "space":
            yield match.end(), Break.SENTENCE if match.lastgroup == "wide_end" else Break.CLAUSE
        elif match.start() != after_whole:
            yield match.end(), classify_space(text, start, match)


def ends_at(text: str, end: int) -> bool | None:
    """Return whether the mark before `end` ends a sentence in a text that arrives in pieces; None: it depends on more.

    The characters of the sentence may be followed by quotes and brackets, which belong to it.
    """
    before = text[max(0, end - LOOK_BACK) : end]
    bare = before.rstrip(CLOSERS)
    following = text[end:].lstrip()[:1]
    word = bare[:-1].split()[-1:] if bare.endswith(".") else []
    if not following and word and ABBREVIATION_OF_NUMBER.fullmatch(word[0].lstrip(OPENERS)):
        return None
    return not bare.endswith(ENDERS) or ends_sentence(bare, following, quoted=len(bare) < len(before))


def classify_space(text: str, start: int, space: re.Match[str]) -> Break:
    if space[0] == " " and text[space.start() - 1].isalnum():
        return Break.SPACE
    if space[0].count("\n") > 1:
        return Break.SENTENCE
    before = text[max(start, space.start() - LOOK_BACK) : space.start()]
    bare = before.rstrip(CLOSERS)
    following = text[space.end() : space.end() + 1]
    if bare.endswith(ENDERS) and ends_sentence(bare, following, quoted=len(bare) < len(before)):
        return Break.SENTENCE
    # A single line end may be a verse or a wrapped line: better than a space, worse than a full stop.
    return Break.CLAUSE if bare.endswith(CLAUSE_MARKS) or "\n" in space[0] else Break.SPACE


def ends_sentence(before: str, following: str, *, quoted: bool) -> bool:
    """Return whether the mark at the end of `before` ends a sentence. Counterexamples: `Dr. No`, `wait... what`."""
    if following.islower() and (quoted or before.endswith(("..", "…"))):
        return False
    if not before.endswith(".") or before.endswith(".."):
        return True
    *earlier, word = before[:-1].split() or [""]
    is_list_number = LIST_NUMBER.fullmatch(word) is not None and (not earlier or earlier[-1].endswith(ENDERS))
    return not (is_list_number or is_abbreviation(word.lstrip(OPENERS), following))


def is_abbreviation(word: str, following: str) -> bool:
    """Return whether a dot after `word` belongs to it."""
    if ABBREVIATION_OF_NUMBER.fullmatch(word) and following.isdigit():
        return True
    return ABBREVIATION.fullmatch(word) is not None


def units(text: str, start: int, end: int) -> Iterator[Span]:
    """Yield the spans that are never cut: numbers, markers, tags and grapheme clusters."""
    # `re` has no grapheme clusters. Imported here, since only text without spaces needs it.
    import regex  # type: ignore[import-untyped]

    for match in regex.finditer(rf"{WHOLE}|\X", text, pos=start, endpos=end):
        # Clusters of hundreds of combining marks are split to bound their size.
        for place in range(match.start(), match.end(), 128):
            yield place, min(place + 128, match.end())


def trim(text: str, span: Span) -> Span:
    """Return the span without leading and trailing whitespace."""
    content = text[span[0] : span[1]]
    start = span[1] - len(content.lstrip())
    return start, start + len(content.strip())


def size_of(text: str, start: int, end: int) -> int:
    return len(text[start:end].encode(errors="surrogatepass"))
