"""Find quoted speech in a paragraph, so that another voice can speak it."""

import re
from collections.abc import Iterator

Span = tuple[int, int]

# Opening and closing marks. Straight quotes are distinguished by the spaces around them: 6" is neither.
OPENING = re.compile(r'“|«|„|「|『|(?:(?<=[\s(\[—–-])|^)"(?=\S)')
CLOSING = {
    "“": re.compile("”"),
    "«": re.compile("»"),
    "„": re.compile("[“”]"),
    "「": re.compile("」"),
    "『": re.compile("』"),
    '"': re.compile(r'(?<=\S)"(?!\w)'),
    # An apostrophe at the end of a word (the boys’ room) has no mark before it; speech ends with one.
    "‘": re.compile(r"(?<=[.,!?…;:—–-])’(?!\w)"),
}
SINGLE_OPENING = re.compile(r"(?:(?<=[\s(\[—–-])|^)‘(?=\w)")


def quoted_spans(paragraph: str) -> list[Span]:
    """Return the spans of quoted speech, with their marks, in order.

    A quote that is not closed reaches to the end of the paragraph, as in speech of several paragraphs. Single quotes
    count only in paragraphs without double ones.
    """
    double = list(_spans(paragraph, OPENING))
    return double or list(_spans(paragraph, SINGLE_OPENING, closed_only=True))


def _spans(paragraph: str, opening: re.Pattern[str], *, closed_only: bool = False) -> Iterator[Span]:
    at = 0
    while found := opening.search(paragraph, at):
        end = CLOSING[found[0]].search(paragraph, found.end())
        if end is None and closed_only:
            return
        at = end.end() if end else len(paragraph)
        yield found.start(), at
