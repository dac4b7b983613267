"""Read a book from a text or Markdown file: chapters by their headings."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shoal.book.document import Block, Book, Chapter, checked
from shoal.book.readers.xhtml import SCENE_BREAK
from shoal.errors import TextError
from shoal.text.markdown import plain_text

MAX_FILE_BYTES = 32 << 20
NUMBER_WORD = (
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen"
    "|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|first|second|third|fourth|fifth|sixth|seventh"
    "|eighth|ninth|tenth|last"
)
NUMBER = rf"(?:\d{{1,4}}|[ivxlcdm]{{1,12}}|(?:the\s+)?(?:{NUMBER_WORD})(?:[\s-](?:{NUMBER_WORD}))?)"
HEADING = re.compile(
    rf"(?:(?:chapter|part|book|volume|canto|act|scene|letter|section|stave|lecture|kapitel|chapitre)\s+{NUMBER}"
    r"(?:[.:,—–-]+\s*.{0,120}|\s{2,}.{0,120}|\s*\n.{0,120})?"
    r"|prologue|epilogue|preface|foreword|introduction|afterword|conclusion|prelude|interlude|appendix(?:\s+\w{1,4})?"
    r"|[IVXLC]{1,8}\.?)[.:]?",
    re.IGNORECASE | re.DOTALL,
)
# Project Gutenberg puts its licence around a text, between these lines.
GUTENBERG = re.compile(
    r"^\*\*\* ?(START|END) OF (?:THE|THIS) PROJECT GUTENBERG EBOOK.{0,200}\*\*\*[ \t]*$", re.MULTILINE
)
HEADER_FIELD = re.compile(
    r"^(Title|Author|Language|title|author|language|lang|date|publisher):[ \t]*(.+)$", re.MULTILINE
)
FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.{0,8000}?)\n(?:---|\.\.\.)[ \t]*\n", re.DOTALL)
RULE = re.compile(r"^ {0,3}(?:(?:\* ?){3,}|(?:- ?){3,}|(?:_ ?){3,})[ \t]*$", re.MULTILINE)
ITALICS = re.compile(r"(?<![\w_])_([^_]{1,2000})_(?![\w_])")


@dataclass(frozen=True, slots=True)
class _Heading:
    """Heading of a Markdown file: its level, text and lines."""

    level: int
    text: str
    start: int
    end: int


def read_text_book(path: Path) -> Book:
    """Read a text file: paragraphs between empty lines, chapters by lines such as `Chapter 1`. Raises TextError."""
    content = _read(path)
    text, fields = _without_gutenberg(content)
    title = fields.get("title") or path.stem
    chapters = tuple(_by_headings(_paragraphs(text), title))
    return checked(Book(title, chapters, fields.get("author", ""), _language(fields)))


def read_markdown_book(path: Path) -> Book:
    """Read a Markdown file: a chapter per heading of the highest level that occurs twice. Raises TextError."""
    content = _read(path)
    front = FRONT_MATTER.match(content)
    fields = _fields(front[1]) if front else {}
    text = content[front.end() :] if front else content
    headings = _headings(text)
    level = _chapter_level(headings)
    above = next((each.text for each in headings if each.level < level), None)
    title = fields.get("title") or above or path.stem
    chapters = tuple(_markdown_chapters(text.splitlines(), headings, level, title))
    return checked(Book(title, chapters, fields.get("author", ""), _language(fields), date=fields.get("date", "")))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as problem:
        raise TextError(f"cannot read {path}: {problem.strerror or problem}") from None
    if len(content) > MAX_FILE_BYTES:
        raise TextError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB: not a book")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise TextError(f"{path} is not UTF-8 text: invalid byte at offset {problem.start}; convert it first") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _without_gutenberg(content: str) -> tuple[str, dict[str, str]]:
    """Return the text between the licence of Project Gutenberg, and the title and author stated in its header."""
    marks = {match[1]: match for match in GUTENBERG.finditer(content)}
    if "START" not in marks:
        return content, {}
    start, end = marks["START"].end(), marks["END"].start() if "END" in marks else len(content)
    return content[start:end], _fields(content[: marks["START"].start()])


def _fields(header: str) -> dict[str, str]:
    return {name.lower(): value.strip().strip("\"'") for name, value in HEADER_FIELD.findall(header[:8000])}


def _language(fields: dict[str, str]) -> str:
    stated = fields.get("language") or fields.get("lang") or ""
    return {"english": "en", "german": "de", "french": "fr"}.get(stated.lower(), stated if len(stated) <= 12 else "")


def _paragraphs(text: str) -> list[str]:
    """Split at empty lines; a text without any has a paragraph per line."""
    separator = r"\n[ \t]*\n\s*" if re.search(r"\S[ \t]*\n[ \t]*\n\s*\S", text) else r"\n+"
    return [each.strip() for each in re.split(separator, text) if each.strip()]


def _by_headings(paragraphs: Iterable[str], title: str) -> Iterator[Chapter]:
    """Yield chapters. Headings without text that occur again later are a table of contents, and left out."""
    found = list(_sections(paragraphs, title))
    last = {_label(chapter.title): number for number, chapter in enumerate(found)}
    for number, chapter in enumerate(found):
        listed = all(block.heading for block in chapter.blocks)
        if not (listed and last[_label(chapter.title)] > number):
            yield chapter


def _label(title: str) -> str:
    """Return `chapter ii` for "CHAPTER II. The Return": contents and headings may differ in the rest."""
    return " ".join(word.strip(".:,—–-") for word in title.casefold().split()[:2])


def _sections(paragraphs: Iterable[str], title: str) -> Iterator[Chapter]:
    current, blocks, after_break = title, list[Block](), False
    for paragraph in paragraphs:
        text = " ".join(ITALICS.sub(r"\1", paragraph).split())
        if SCENE_BREAK.fullmatch(text):
            after_break = True
            continue
        heading = paragraph.count("\n") <= 1 and len(paragraph) <= 160 and HEADING.fullmatch(paragraph) is not None
        if heading:
            yield Chapter(current, tuple(blocks))
            current, blocks = text, []
        blocks.append(Block(text, heading, after_break))
        after_break = False
    yield Chapter(current, tuple(blocks))


def _headings(text: str) -> list[_Heading]:
    from markdown_it import MarkdownIt

    parsed = MarkdownIt("commonmark", {"maxNesting": 20}).disable(["code"]).parse(text)
    return [
        _Heading(int(opened.tag[1]), plain_text(inline.content).replace("\n", " "), *(opened.map or (0, 0)))
        for opened, inline in pairwise(parsed)
        if opened.type == "heading_open" and opened.level == 0
    ]


def _chapter_level(headings: list[_Heading]) -> int:
    """Return the highest level with two headings, else the highest level there is."""
    levels = [each.level for each in headings]
    return next((level for level in range(1, 7) if levels.count(level) > 1), min(levels, default=1))


def _markdown_chapters(lines: list[str], headings: list[_Heading], level: int, title: str) -> Iterator[Chapter]:
    current, blocks, at = title, list[Block](), 0
    for heading in [*headings, _Heading(0, "", len(lines), len(lines))]:
        blocks += _markdown_blocks("\n".join(lines[at : heading.start]))
        at = heading.end
        if heading.level == level:
            yield Chapter(current, tuple(blocks))
            current, blocks = heading.text, []
        if heading.text:
            blocks.append(Block(heading.text, heading=True))
    yield Chapter(current, tuple(blocks))


def _markdown_blocks(text: str) -> Iterator[Block]:
    after_break = False
    for source in RULE.split(text):
        for paragraph in plain_text(source).split("\n\n"):
            if spoken := " ".join(paragraph.split()):
                yield Block(spoken, after_break=after_break)
                after_break = False
        after_break = True
