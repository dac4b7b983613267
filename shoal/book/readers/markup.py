"""Tokens of XML and HTML documents, well-formed or not, in time linear in their length.

Real books are often not well-formed, so an XML parser would reject them, and the standard library's HTML parser takes
quadratic time for hostile ones. Entities are never expanded: declaring one is an error, and nothing outside of the
document is ever read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape

from shoal.errors import TextError

NAME = re.compile(r"</?([A-Za-z_][\w:.-]{0,100})")
ATTRIBUTE = re.compile(r"""(?<![\w:.-])([\w:.-]{1,100})\s*=\s*(?:"([^"]*)"|'([^']*)')""")
RAW_TEXT = re.compile(r"</(?:script|style)", re.IGNORECASE)
MAX_ATTRIBUTE_CHARACTERS = 4_096  # limit for one tag; what follows, such as an image in the tag, is not read
DECLARED_ENCODING = re.compile(rb"""^\s*<\?xml[^>]{0,200}\bencoding\s*=\s*["']([A-Za-z0-9._-]{1,40})["']""")
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


@dataclass(frozen=True, slots=True)
class StartTag:
    """Start of an element; `empty` elements (`<br/>`) have no end tag. Names are lower case, without prefix."""

    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    empty: bool = False


@dataclass(frozen=True, slots=True)
class EndTag:
    name: str


Token = StartTag | EndTag | str


def decode(content: bytes, name: str) -> str:
    """Decode a document by its byte order mark or its XML declaration, else as UTF-8. Raises TextError."""
    encoding = next((each for mark, each in BYTE_ORDER_MARKS.items() if content.startswith(mark)), None)
    declared = DECLARED_ENCODING.match(content[:300])
    try:
        return content.decode(encoding or (declared[1].decode() if declared else "utf-8"))
    except (UnicodeDecodeError, LookupError) as problem:
        raise TextError(f"{name!r:.200} cannot be decoded: {problem}") from None


def tokens(document: str) -> Iterator[Token]:
    """Yield tags and texts in order; comments, declarations and the content of scripts are left out.

    Raises TextError for a document that declares entities.
    """
    at = 0
    while (mark := document.find("<", at)) >= 0:
        if mark > at:
            yield unescape(document[at:mark])
        token, at = _markup(document, mark)
        if token is not None:
            yield token
        if isinstance(token, StartTag) and token.name in ("script", "style") and not token.empty:
            end = RAW_TEXT.search(document, at)
            at = end.start() if end else len(document)
    if at < len(document):
        yield unescape(document[at:])


def _markup(document: str, mark: int) -> tuple[Token | None, int]:
    """Return the token at a `<` and its end; a token that is never closed extends to the end of the document."""
    if document.startswith("<!--", mark):
        return None, _after(document, "-->", mark + 4)
    if document.startswith("<![CDATA[", mark):
        end = _after(document, "]]>", mark)
        return document[mark + 9 : end].removesuffix("]]>") or None, end
    if document.startswith(("<!", "<?"), mark):
        return None, _declaration_end(document, mark)
    name = NAME.match(document, mark)
    if name is None:
        return "<", mark + 1
    end = _tag_end(document, name.end())
    return _tag(name, document[name.end() : end - 1]), end


def _tag(name: re.Match[str], rest: str) -> Token:
    local = name[1].rpartition(":")[2].lower()
    if name[0].startswith("</"):
        return EndTag(local)
    pairs = ATTRIBUTE.findall(rest[:MAX_ATTRIBUTE_CHARACTERS])
    attributes = {key.lower(): unescape(double or single) for key, double, single in pairs}
    return StartTag(local, attributes, rest.endswith("/"))


def _tag_end(document: str, start: int) -> int:
    """Return the index after the `>` of a tag; one inside of a quoted value does not end it."""
    end = _after(document, ">", start)
    for _ in range(8):
        if document.count('"', start, end) % 2 == 0:
            break
        end = _after(document, ">", end)
    return end


def _declaration_end(document: str, mark: int) -> int:
    end = _after(document, ">", mark)
    # A DOCTYPE ends here at the first `>`, inside its internal subset; the next declarations are separate tokens.
    if document.startswith("<!ENTITY", mark) or "<!ENTITY" in document[mark:end]:
        raise TextError("a document of the book declares entities, which is not allowed")
    return end


def _after(document: str, closing: str, start: int) -> int:
    """Return the index after the next `closing`, or the end of the document."""
    found = document.find(closing, start)
    return len(document) if found < 0 else found + len(closing)
