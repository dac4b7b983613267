"""Hardened XML reader: no document types or entity declarations, bounded depth; errors carry line and column."""

from collections.abc import Callable
from typing import NoReturn, Protocol
from xml.parsers import expat

from shoal.errors import TextError
from shoal.text.tokenizer import check_unicode

MAX_DEPTH = 32


class Handler(Protocol):
    """Receives the elements of a document in order. The reader adds line and column to its TextErrors."""

    def start(self, name: str, attributes: dict[str, str]) -> None: ...
    def end(self, name: str) -> None: ...
    def text(self, text: str) -> None: ...


def read_xml(document: str, handler: Handler, kind: str) -> None:
    """Parse a document. Raises TextError, `KIND line 1, column 8: ...`, if it is malformed or refused."""
    check_unicode(document)
    parser = expat.ParserCreate("utf-8")
    opened: list[str] = []

    def placed(work: Callable[[], None]) -> None:
        try:
            work()
        except TextError as problem:
            line, column = parser.CurrentLineNumber, parser.CurrentColumnNumber + 1
            raise TextError(f"{kind} line {line}, column {column}: {problem}") from None

    def start(name: str, attributes: dict[str, str]) -> None:
        opened.append(name)
        placed(lambda: _check_depth(len(opened)))
        placed(lambda: handler.start(name, attributes))

    def end(name: str) -> None:
        opened.pop()
        placed(lambda: handler.end(name))

    def refuse(*_: object) -> None:
        placed(_refuse_declarations)

    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = lambda text: placed(lambda: handler.text(text))
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        parser.Parse(document.encode(), True)
    except expat.ExpatError as problem:
        reason = _reason(problem.code, opened)
        raise TextError(f"{kind} line {problem.lineno}, column {problem.offset + 1}: {reason}") from None


def _reason(code: int, opened: list[str]) -> str:
    """Return expat's message, with a correction for common errors."""
    message = expat.errors.messages.get(code, "not well-formed")
    if message == expat.errors.XML_ERROR_INVALID_TOKEN:
        return f"{message}: write &amp; for & and &lt; for <"
    if message == expat.errors.XML_ERROR_UNDEFINED_ENTITY:
        return f"{message}: write the character itself; there are &amp; &lt; &gt; &quot; &apos;"
    if message == expat.errors.XML_ERROR_TAG_MISMATCH and opened:
        return f"{message}: </{opened[-1][:64]}> is expected here"
    if message == expat.errors.XML_ERROR_NO_ELEMENTS and opened:
        return f"<{opened[-1][:64]}> is not closed: add </{opened[-1][:64]}>"
    return message


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TextError(f"elements are nested more than {MAX_DEPTH} deep")


def _refuse_declarations() -> NoReturn:
    raise TextError("document types and entity declarations are not allowed: remove the <!DOCTYPE ...>")
