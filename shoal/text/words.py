"""Words of a text as it was written, and which of them each spoken word belongs to.

Normalization rewrites a text in many steps that keep no positions. A written word is therefore matched with the spoken
ones by its own reading: "$12.50" alone reads "twelve dollars fifty", so these three spoken words belong to it.
Where a word reads differently in its context, the words between two matches are divided in proportion to their length.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shoal.text.lexicon import UNSPACED
from shoal.text.markup.pauses import PAUSE
from shoal.text.phonemes import SPAN
from shoal.text.style_tags import S1_TAG, S2_TAG
from shoal.text.tokenizer import SPEAKER_TAG

# Chinese, Japanese and Korean have no spaces: a character is a word, with the marks that follow it.
WORD = re.compile(rf"{SPAN.pattern}|[{UNSPACED}][^\w\s]*|[^\s{UNSPACED}]+")
UNSPOKEN = re.compile(f"{PAUSE.pattern}|{SPEAKER_TAG.pattern}|{S1_TAG.pattern}|{S2_TAG.pattern}", re.IGNORECASE)
XML_TAG = re.compile(r"<[^<>]{1,1000}>")
# Markdown reads the label of a link; `<https://…>` is a link too, not a tag.
LINK = re.compile(
    r"(?<!\\)!?\[(?P<label>[^\[\]\n]{1,200})\]\([^\s()]{0,1000}(?:[ \t]{1,4}(?:\"[^\"\n]{0,200}\"|'[^'\n]{0,200}'))?\)"
)
HTML_TAG = re.compile(r"</?[A-Za-z][\w-]{0,32}(?:\s[^<>]{0,1000})?/?>")
NOT_LETTERS = re.compile(r"[\W_]+")
# A word with one of these may be read as more than its letters: "C++", "#tag".
SYMBOL = re.compile(r"[^\w\s.,;:!?…'\"‘’“”()\[\]*`~—–-]")
OPERATOR = re.compile(r"[-+*/<>=×÷±≤≥≠≈→&%@^°]+")
MARKS_BEFORE, MARKS_AFTER = re.compile(r"^[\W_]+"), re.compile(r"[\W_]+$")
# Words that a mismatch may comprise on both sides together; bounds the search for the next match.
WINDOW = 24


@dataclass(frozen=True, slots=True)
class TextWord:
    """`text` is characters [first, last) of the text it was found in."""

    text: str
    first: int
    last: int


Reading = Callable[[str], Sequence[str]]


def written_words(text: str, *, ssml: bool = False) -> list[TextWord]:
    """Return the words of a text as its author wrote it, with their punctuation; markup is not a word."""
    if ssml:
        return _words(_masked(XML_TAG, text))
    return _words(_masked(HTML_TAG, _masked(UNSPOKEN, LINK.sub(_masked_link, text))))


def spoken_words(text: str) -> list[TextWord]:
    """Return the words of a text as the model reads it, without the marks around them; tags are not words."""
    return [each for each in map(_bare, _words(_masked(UNSPOKEN, text))) if each.text]


def match_words(written: Sequence[str], spoken: Sequence[str], reading: Reading) -> list[int | None]:
    """Return, for each spoken word, the index of the written word it belongs to; None: it precedes all of them.

    Words that normalization adds belong to the written word before them: "$1.5 million" reads "… million dollars".
    `reading` returns the words that one written word is spoken as when it stands alone. Takes linear time.
    """
    return _Matcher(written, spoken, reading).match()


def _masked(tags: re.Pattern[str], text: str) -> str:
    """Return the text with spaces in place of tags: positions stay the same."""
    return tags.sub(lambda match: " " * len(match[0]), text)


def _masked_link(link: re.Match[str]) -> str:
    """Return a link with spaces in place of all but its label."""
    before, after = link.start("label") - link.start(), link.end() - link.end("label")
    return " " * before + link["label"] + " " * after


def _words(text: str) -> list[TextWord]:
    found = (TextWord(match[0], match.start(), match.end()) for match in WORD.finditer(text))
    return [each for each in found if any(not character.isspace() for character in each.text)]


def _bare(word: TextWord) -> TextWord:
    """Return a word without the marks around it, which are silent or a pause."""
    if SPAN.fullmatch(word.text):
        return word
    first, last = len(word.text) - len(MARKS_BEFORE.sub("", word.text)), len(MARKS_AFTER.sub("", word.text))
    return TextWord(word.text[first:last], word.first + first, word.first + last)


def bare_word(word: str) -> str:
    """Return a word without the marks around it; a word of marks alone is returned unchanged."""
    return _bare(TextWord(word, 0, len(word))).text or word


def letters(word: str) -> str:
    """Return the letters and digits of a word in lower case, to compare two spellings."""
    return NOT_LETTERS.sub("", word).lower()


class _Matcher:
    def __init__(self, written: Sequence[str], spoken: Sequence[str], reading: Reading) -> None:
        self._written = written
        self._spoken = [letters(each) for each in spoken]
        self._reading = reading
        self._known: dict[str, list[str]] = {}
        self._owners: list[int | None] = []  # written word of each spoken word so far
        # The last word before each place that may have a sound; None if there is none.
        self._last_sounding: list[int | None] = [None]
        for index, word in enumerate(written):
            sounds = letters(word) or OPERATOR.fullmatch(word)
            self._last_sounding.append(index if sounds else self._last_sounding[-1])

    def match(self) -> list[int | None]:
        at = 0
        while at < len(self._written):
            count = self._matching(at, len(self._owners))
            if count is not None:
                self._owners += [at] * count
                at += 1
            else:
                at += self._skip_mismatch(at)
        left = len(self._spoken) - len(self._owners)
        return self._owners + [self._last_sounding[-1]] * left

    def _matching(self, at: int, place: int) -> int | None:
        """Return how many spoken words from `place` on are the written word `at`; None if they are not."""
        word = letters(self._written[at])
        as_written = bool(word) and self._spoken[place : place + 1] == [word]
        if as_written and not SYMBOL.search(self._written[at]):
            return 1
        expected = self._expected(at)
        if self._spoken[place : place + len(expected)] == expected and (expected or not as_written):
            return len(expected)
        return 1 if as_written else None

    def _expected(self, at: int) -> list[str]:
        word = self._written[at]
        if word not in self._known:
            self._known[word] = list(filter(None, map(letters, self._reading(word))))
        return self._known[word]

    def _skip_mismatch(self, at: int) -> int:
        """Assign the spoken words up to the next match to the written ones before it; return how many those are."""
        place = len(self._owners)
        skipped, unmatched = self._next_match(at, place)
        if not skipped:
            self._owners += [self._last_sounding[at]] * unmatched
            return 0
        sizes = [max(1, sum(map(len, self._expected(each)))) for each in range(at, at + skipped)]
        self._owners += _divide(at, sizes, self._spoken[place : place + unmatched])
        return skipped

    def _next_match(self, at: int, place: int) -> tuple[int, int]:
        """Return how many written and spoken words precede the nearest match; without one, all within the window."""
        written, spoken = len(self._written) - at, len(self._spoken) - place
        for total in range(1, WINDOW):
            for skipped in range(max(0, total - spoken), min(total, written) + 1):
                unmatched = total - skipped
                if skipped == written and unmatched == spoken:
                    return skipped, unmatched
                if skipped < written and self._resumes(at + skipped, place + unmatched):
                    return skipped, unmatched
        return min(WINDOW // 2, written), min(WINDOW // 2, spoken)

    def _resumes(self, at: int, place: int) -> bool:
        """Return whether a written word and the one after it match here; one short word may match by chance."""
        count = self._matching(at, place)
        if not count:
            return False
        following = place + count
        if at + 1 == len(self._written) or following == len(self._spoken):
            return True
        return bool(self._matching(at + 1, following)) or len("".join(self._spoken[place:following])) > 5


def _divide(first: int, sizes: Sequence[int], spoken: Sequence[str]) -> list[int | None]:
    """Return the written word of each spoken one, in proportion to the letters of both."""
    ends = list(accumulate(sizes))
    places = list(accumulate(max(1, len(word)) for word in spoken))
    owners, word = list[int | None](), 0
    for place, each in zip(places, spoken, strict=True):
        middle = (place - len(each) / 2) * ends[-1] / places[-1]
        while word + 1 < len(ends) and ends[word] <= middle:
            word += 1
        owners.append(first + word)
    return owners
