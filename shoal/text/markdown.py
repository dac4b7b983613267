"""Markdown and HTML to plain text that can be read aloud.

Language models answer in Markdown. Headings and list items become sentences, links become their text, table rows become
"header: cell" sentences, and markup characters disappear. The words of the text are kept in order.
"""

import html
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

# A text without any of these has no markup, and is returned as it is: parsing costs several microseconds per character.
MARKUP_CHARACTER = re.compile(r"[*_`~\[\]<&\\|]")
MARKUP_LINE = re.compile(
    r"^ {0,3}(?:#{1,6}[ \t]|>|[-+][ \t]|\d{1,9}[.)][ \t])|^ {0,3}(?:=+|-{2,}|(?:- ?){3,})[ \t]*$",
    re.MULTILINE,
)
# The "*" of "5*3*2" is a multiplication sign, not emphasis. The ">" of "> 5" at the start of a line compares numbers
# and is not a quotation.
PRODUCT_SIGN = re.compile(r"(?<=\d)\*(?=\d)")
COMPARISON_AT_LINE_START = re.compile(r"^( {0,3})>(?=[ \t]?[$£€¥₹]?\.?\d)", re.MULTILINE)
# "[Alice]: Hello" names a speaker. Only "[name]: address" is a link definition.
NO_LINK_DEFINITION = re.compile(
    r"^( {0,3})(\[[^\]\n]{1,200}\]:)(?![ \t]*(?:<|https?://|www\.|mailto:|[/#]))", re.MULTILINE
)
# "a<b and c>d" and "<your name>": words in a tag that are no attributes are text. The alternatives are attributes
# that HTML writes without a value.
NO_TAG = re.compile(
    r"<(?=[A-Za-z][\w-]{0,32}(?:\s+(?!(?:allowfullscreen|async|autofocus|autoplay|checked|controls|default|defer|disabled"
    r"|hidden|inert|itemscope|loop|multiple|muted|nomodule|novalidate|open|playsinline|readonly|required|reversed|selected)"
    r"\b)[A-Za-z][\w'-]{0,32}){1,8}\s?>)"
)
FOOTNOTE = re.compile(r"\[\^[^\]\s]{1,32}\]:?")
TASK_BOX = re.compile(r"^\[[ xX]\][ \t]+")
TAG = re.compile(r"</?[A-Za-z][^<>]{0,1000}>|<!--.{0,1000}?-->", re.DOTALL)
LINE_BREAKING_TAG = re.compile(
    r"</?(?:br|p|div|li|ul|ol|h[1-6]|tr|table|blockquote|hr|section|article)\b[^<>]{0,1000}>", re.IGNORECASE
)
UNREAD_ELEMENT = re.compile(r"<(script|style)\b[^<>]{0,1000}>", re.IGNORECASE)
CLOSING_TAGS = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in ("script", "style")}
BREAK = re.compile(r"<br\b[^<>]{0,1000}>", re.IGNORECASE)
TERMINAL = (".", "!", "?", "…", ":", ";", ",", "。", "！", "？")
CLOSERS = "\"'”’)]*_"


def plain_text(text: str) -> str:
    """Return `text` without Markdown and HTML markup; text without markup is returned unchanged."""
    if not has_markup(text):
        return text
    text = NO_LINK_DEFINITION.sub(r"\1\\\2", FOOTNOTE.sub("", NO_TAG.sub(r"\<", text)))
    protected = COMPARISON_AT_LINE_START.sub(r"\1\\>", PRODUCT_SIGN.sub(r"\\*", text))
    blocks = _blocks(_parser().parse(protected))
    return "\n\n".join(block for block in blocks if block.strip())


def has_markup(text: str) -> bool:
    """Return whether a text may have markup. The result may be True for a text without markup."""
    find_line = MARKUP_LINE.search if "\n" in text else MARKUP_LINE.match
    return bool(MARKUP_CHARACTER.search(text) or find_line(text))


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    # Without indented code blocks: indented text is prose.
    return MarkdownIt("commonmark", {"maxNesting": 20}).enable(["table", "strikethrough"]).disable(["code"])


def _blocks(tokens: Iterable["Token"]) -> Iterator[str]:
    """Yield the text of each block in reading order."""
    lists: list[_List] = []
    table: _Table | None = None
    heading = False
    for token in tokens:
        match token.type:
            case "heading_open":
                heading = True
            case "heading_close":
                heading = False
            case "bullet_list_open":
                lists.append(_List(None))
            case "ordered_list_open":
                lists.append(_List(int(token.attrGet("start") or 1)))
            case "bullet_list_close" | "ordered_list_close":
                lists.pop()
            case "list_item_open":
                lists[-1].begin_item(token.info + token.markup)
            case "table_open":
                table = _Table()
            case "table_close":
                assert table is not None
                yield from table.sentences()
                table = None
            case "tr_open":
                assert table is not None
                table.begin_row()
            case "inline" if table is not None:
                table.add_cell(_inline(token))
            case "inline":
                content = _inline(token)
                if lists:
                    yield _sentence(lists[-1].mark(TASK_BOX.sub("", content)))
                else:
                    yield _sentence(content) if heading else content
            case "fence" | "code_block":
                yield _sentence(token.content.strip())
            case "html_block":
                yield strip_tags(token.content)
            case _:
                pass


class _List:
    """Numbering of one list level. A single numbered item is prose that begins with a number, and keeps its dot."""

    def __init__(self, start: int | None) -> None:
        self._ordered = start is not None
        self._mark = ""

    def begin_item(self, mark: str) -> None:
        self._mark = mark if self._ordered else ""

    def mark(self, content: str) -> str:
        """Return the first paragraph of an item with its number, further paragraphs as they are."""
        mark, self._mark = self._mark, ""
        return f"{mark} {content}" if mark else content


class _Table:
    def __init__(self) -> None:
        self._rows: list[list[str]] = []

    def begin_row(self) -> None:
        self._rows.append([])

    def add_cell(self, content: str) -> None:
        self._rows[-1].append(content)

    def sentences(self) -> Iterator[str]:
        """Yield one sentence per row: "Name: Ann, Age: 5."; a table of a header alone is its cells."""
        header, *rows = self._rows or [[]]
        if not rows:
            yield _sentence(", ".join(filter(None, header)))
        for row in rows:
            named = zip(header, row, strict=False)
            cells = [f"{name}: {cell}" if name else cell for name, cell in named if cell]
            yield _sentence(", ".join(cells))


def _inline(token: "Token") -> str:
    parts: list[str] = []
    for child in token.children or ():
        match child.type:
            case "text" | "code_inline":
                parts.append(child.content)
            case "softbreak":
                parts.append("\n")
            case "hardbreak":
                parts.append(_line_end(parts))
            case "image":
                parts.append(child.content)
            case "html_inline":
                parts.append(_line_end(parts) if LINE_BREAKING_TAG.fullmatch(child.content) else "")
            case _:
                pass
    return "".join(parts).strip()


def strip_tags(text: str) -> str:
    """Return the text content of an HTML fragment; scripts and styles have none."""
    text = BREAK.sub(lambda match: _line_end([text[max(match.start() - 9, 0) : match.start()]]), _without_unread(text))
    return html.unescape(TAG.sub("", LINE_BREAKING_TAG.sub("\n", text))).strip()


def _without_unread(text: str) -> str:
    """Return the text without scripts and styles. The words after an element that is never closed are kept.

    Linear: a search for a closing tag begins where the last one ended, and a name that is not closed is searched once.
    """
    parts: list[str] = []
    unclosed: set[str] = set()
    end = 0
    for opening in UNREAD_ELEMENT.finditer(text):
        name = opening[1].lower()
        if opening.start() < end or name in unclosed:
            continue
        closing = CLOSING_TAGS[name].search(text, opening.end())
        if closing is None:
            unclosed.add(name)
            continue
        parts.append(text[end : opening.start()])
        end = closing.end()
    return " ".join((*parts, text[end:]))


def _line_end(parts: list[str]) -> str:
    """Return the text for a forced line break: a comma for a short pause, unless punctuation makes one."""
    before = next((part.rstrip() for part in reversed(parts) if part.strip()), "")
    return "\n" if not before or before.rstrip(CLOSERS).endswith(TERMINAL) else ",\n"


def _sentence(text: str) -> str:
    """Return `text` with a full stop if it ends without punctuation, so that it is read as a sentence of its own."""
    text = text.strip()
    return f"{text}." if text and not text.rstrip(CLOSERS).endswith(TERMINAL) else text
