"""Blocks of text of a content document: what a narrator reads, without notes, page numbers and navigation."""

import re
from dataclasses import dataclass, field

from shoal.book.readers.markup import EndTag, StartTag, tokens


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


BLOCKS = _names(
    "address article aside blockquote body caption center dd details div dl dt fieldset figcaption figure footer form"
    " h1 h2 h3 h4 h5 h6 header hgroup html li main nav ol p pre section summary table tbody td tfoot th thead tr ul"
)
HEADINGS = _names("h1 h2 h3 h4 h5 h6")
VOID = _names("area base br col embed hr img input link meta param source track wbr")
UNREAD = _names("audio canvas head iframe math nav noscript object rp rt script style svg template video")
# Values of epub:type and, with the prefix doc-, of role.
UNREAD_TYPES = _names(
    "biblioref endnote endnotes footnote footnotes index landmarks loi lot noteref page-list pagebreak pagelist"
    " rearnote rearnotes toc"
)
# Text of a link to a note: only a number or a reference mark.
NOTE_REFERENCE = re.compile(r"[\[({]?\s*(?:\d{1,4}|[*†‡§¶]{1,4})\s*[\])}]?")
SCENE_BREAK = re.compile(r"[\s*•·⁂#~_—–=-]+")
TERMINAL = (".", "!", "?", "…", ":", ";", ",", "。", "！", "？")


@dataclass(slots=True)
class TextBlock:
    """A block of a content document, and the ids of elements that begin at it: the targets of the table of contents."""

    text: str
    level: int = 0  # heading level 1 to 6; 0: a paragraph
    after_break: bool = False
    ids: set[str] = field(default_factory=set)


def text_blocks(document: str) -> list[TextBlock]:
    """Return the blocks of a document in reading order. Raises TextError for a document that declares entities."""
    reader = _BlockReader()
    for token in tokens(document):
        if isinstance(token, str):
            reader.text(token)
        elif isinstance(token, EndTag):
            reader.end(token.name)
        else:
            reader.start(token)
    reader.flush()
    return reader.blocks


class _BlockReader:
    def __init__(self) -> None:
        self.blocks: list[TextBlock] = []
        self._parts: list[str] = []
        self._ids: set[str] = set()
        self._level = 0
        self._after_break = False
        self._unread: list[str] = []  # open skipped elements: the outermost, and those of its name in it
        self._link: int | None = None  # index of the first part inside of a link within the book

    def start(self, tag: StartTag) -> None:
        empty = tag.empty or tag.name in VOID
        if self._unread or _is_unread(tag):
            if not self._unread and "pagebreak" in _types(tag):
                self._ids.update(_anchors(tag))  # a chapter may begin at the number of a page
            # Count only elements with the name of the outermost, so that other missing end tags do no harm.
            if not empty and (not self._unread or tag.name == self._unread[0]):
                self._unread.append(tag.name)
            return
        if tag.name in BLOCKS or tag.name == "hr":
            self.flush()
        self._ids.update(_anchors(tag))
        if tag.name in HEADINGS:
            self._level = int(tag.name[1])
        elif tag.name == "br":
            self._line_break()
        elif tag.name == "hr":
            self._after_break = True
        elif tag.name == "a" and "#" in tag.attributes.get("href", ""):
            self._link = len(self._parts)

    def end(self, name: str) -> None:
        if self._unread:
            if name == self._unread[0]:
                self._unread.pop()
            return
        if name == "a":
            self._drop_note_reference()
        if name in BLOCKS:
            self.flush()
        if name in HEADINGS:
            self._level = 0

    def text(self, text: str) -> None:
        if not self._unread:
            self._parts.append(text)

    def flush(self) -> None:
        """End the current block. Ids of blocks without text pass to the next one."""
        text = " ".join("".join(self._parts).split())
        self._parts, self._link = [], None
        if not text:
            return
        if SCENE_BREAK.fullmatch(text):
            self._after_break = True
            return
        self.blocks.append(TextBlock(text, self._level, self._after_break, self._ids))
        self._ids, self._after_break = set(), False

    def _line_break(self) -> None:
        """Separate the lines of a heading by a full stop, so that they are not read as one sentence."""
        before = self._parts[-1].rstrip() if self._level and self._parts else ""
        self._parts.append(". " if before and not before.endswith(TERMINAL) else " ")

    def _drop_note_reference(self) -> None:
        if self._link is not None and NOTE_REFERENCE.fullmatch("".join(self._parts[self._link :]).strip()):
            del self._parts[self._link :]
        self._link = None


def _anchors(tag: StartTag) -> list[str]:
    """Return the names by which a link can refer to an element; old books use `<a name="…">`."""
    named = ("id", "name") if tag.name == "a" else ("id",)
    return [tag.attributes[name] for name in named if name in tag.attributes]


def _types(tag: StartTag) -> set[str]:
    roles = tag.attributes.get("role", "").lower().split()
    return {*tag.attributes.get("epub:type", "").lower().split(), *(role.removeprefix("doc-") for role in roles)}


def _is_unread(tag: StartTag) -> bool:
    return tag.name in UNREAD or "hidden" in tag.attributes or not UNREAD_TYPES.isdisjoint(_types(tag))
