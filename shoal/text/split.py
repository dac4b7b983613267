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
    """Where a text may be cut, the best places first."""

    SENTENCE = 0
    CLAUSE = 1
    SPACE = 2
    ANYWHERE = 3


# The bounds say what counts: a bracket of a page is no marker, a run of a thousand digits no number.
TAG = r"<\|speaker:[0-9]{1,9}\|>"
MARKER = r"\([^()\[\]\r\n]{1,64}\)|\[[^()\[\]\r\n]{1,64}\]"
NUMBER = r"[$€£¥]?\d{1,32}(?:(?:[.,:/'’–-]|[ \u00a0\u202f](?=\d{3}(?!\d)))\d{1,32}){0,8}[%‰°]?[A-Za-z]{0,3}"
WHOLE = f"{TAG}|{MARKER}|{NUMBER}"

CLOSERS = "\"'”’»)]}」』）】》"
OPENERS = "\"'“‘(["
ENDERS = tuple(".!?…؟۔।።။")
CLAUSE_MARKS = tuple(",;:—–،؛")
# Chinese and Japanese put no space after a mark, so the mark itself is the place.
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
# Ordinary words or endings, unless a number follows: "No. 5", "Fig. 3".
ABBREVIATION_OF_NUMBER = re.compile("nos?|figs?|vols?|pp?|ch|sec|eq|art", re.IGNORECASE)
LIST_NUMBER = re.compile(r"\d{1,3}")


def split_dialogue(text: str, max_bytes: int, *, drop_lead_in: bool = False) -> list[str]:
    """S2's batches: speaker turns in groups of at most five and, where turns are short enough, `max_bytes` of UTF-8.

    Text without a speaker tag is one batch, whatever its length; a turn is never cut. Words before the first tag are
    given to speaker 0: upstream loses them without a word. `drop_lead_in` loses them too, for parity.
    """
    turns = list(speaker_lines(text, drop_lead_in))
    if not turns:
        return [text]
    batches: list[list[str]] = [[]]
    size = 0
    for turn in turns:
        turn_size = len(turn.encode())
        if batches[-1] and (len(batches[-1]) == LINES_PER_TURN or size + turn_size > max_bytes):
            batches.append([])
            size = 0
        batches[-1].append(turn)
        size += turn_size
    return ["\n".join(batch) for batch in batches]


def speaker_lines(text: str, drop_lead_in: bool) -> Iterator[str]:
    """Each tag with the words after it. A tag with no words is left out: a model asked to say nothing babbles."""
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
    """Pieces of at most `max_bytes` of UTF-8 that give the text again when joined, up to whitespace.

    Longer are only pieces whose one number, marker, tag or visible character is longer by itself, and pieces that took
    in a neighbour without a word in it (`...`, `!!`), since such a piece alone cannot be spoken.
    """
    if max_bytes < 1:
        raise InvalidRequest(f"a piece of {max_bytes} bytes holds no text")
    spans = divide(text, (0, len(text)), Break.SENTENCE, max_bytes)
    return [text[start:end] for start, end in attach_wordless(text, spans)]


def divide(text: str, span: Span, level: Break, max_bytes: int) -> list[Span]:
    """Spans without outer whitespace, cut at `level` or better, and below it only where a stretch is too long."""
    start, end = trim(text, span)
    if size_of(text, start, end) <= max_bytes:
        return [(start, end)] if start < end else []
    if level is Break.ANYWHERE:
        return pack(text, units(text, start, end), max_bytes)
    cuts = [start, *(place for place, found in breaks(text, start, end) if found <= level), end]
    parts = pairwise(cuts)
    return pack(text, (piece for part in parts for piece in divide(text, part, Break(level + 1), max_bytes)), max_bytes)


def pack(text: str, spans: Iterable[Span], max_bytes: int) -> list[Span]:
    """Neighbours joined from left to right as long as they fit, with what stands between them."""
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
    """A piece without a letter or digit joins the piece before it; at the very start, the piece after it."""
    kept: list[Span] = []
    last_has_words = True
    for start, end in spans:
        spoken = has_words(text[start:end])
        if kept and not (spoken and last_has_words):
            kept[-1] = (kept[-1][0], end)
            last_has_words |= spoken
        else:
            kept.append((start, end))
            last_has_words = spoken
    return kept


def breaks(text: str, start: int, end: int) -> Iterator[tuple[int, Break]]:
    """Every place between `start` and `end` where a cut is possible, with its kind."""
    after_whole = start
    for match in PLACE.finditer(text, start, end):
        if match["whole"]:
            # What stands after a marker or a tag is what it is about.
            after_whole = match.end() if match["whole"][-1] in ")]>" else start
        elif match["space"] is None:
            yield match.end(), Break.SENTENCE if match["wide_end"] else Break.CLAUSE
        elif match.start() != after_whole:
            yield match.end(), kind_of_space(text, start, match)


def kind_of_space(text: str, start: int, space: re.Match[str]) -> Break:
    if space[0].count("\n") > 1:
        return Break.SENTENCE
    before = text[max(start, space.start() - LOOK_BACK) : space.start()]
    bare = before.rstrip(CLOSERS)
    following = text[space.end() : space.end() + 1]
    if bare.endswith(ENDERS) and ends_sentence(bare, following, quoted=len(bare) < len(before)):
        return Break.SENTENCE
    # A lone line end may be a verse or a wrapped line: better than a space, not as good as a full stop.
    return Break.CLAUSE if bare.endswith(CLAUSE_MARKS) or "\n" in space[0] else Break.SPACE


def ends_sentence(before: str, following: str, *, quoted: bool) -> bool:
    """Whether the mark at the end of `before` ends a sentence, given the next character: `Dr. No`, `wait... what`."""
    if following.islower() and (quoted or before.endswith(("..", "…"))):
        return False
    if not before.endswith(".") or before.endswith(".."):
        return True
    *earlier, word = before[:-1].split() or [""]
    counts_a_list = LIST_NUMBER.fullmatch(word) is not None and (not earlier or earlier[-1].endswith(ENDERS))
    return not (counts_a_list or is_abbreviation(word.lstrip(OPENERS), following))


def is_abbreviation(word: str, following: str) -> bool:
    """Whether a dot after `word` belongs to it."""
    if ABBREVIATION_OF_NUMBER.fullmatch(word) and following.isdigit():
        return True
    return ABBREVIATION.fullmatch(word) is not None


def units(text: str, start: int, end: int) -> Iterator[Span]:
    """What is never cut: numbers, markers, tags, and characters as people see them (a letter with its accents)."""
    # Only text without spaces gets here, so the import is seldom paid. `re` knows no grapheme clusters.
    import regex  # type: ignore[import-untyped]

    for match in regex.finditer(rf"{WHOLE}|\X", text, pos=start, endpos=end):
        # A cluster of hundreds of combining marks is no character anyone sees.
        for place in range(match.start(), match.end(), 128):
            yield place, min(place + 128, match.end())


def trim(text: str, span: Span) -> Span:
    """The span without the whitespace at its ends."""
    piece = text[span[0] : span[1]]
    start = span[1] - len(piece.lstrip())
    return start, start + len(piece.strip())


def size_of(text: str, start: int, end: int) -> int:
    return len(text[start:end].encode(errors="surrogatepass"))
