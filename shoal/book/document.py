"""A book as it is spoken: chapters of blocks of text, with its metadata and cover."""

from dataclasses import dataclass, replace

from shoal.errors import InvalidRequest, TextError
from shoal.text.clean import has_words

MAX_TEXT_CHARACTERS = 16_000_000  # limit for a whole book; four times the Bible
MAX_CHAPTERS = 5_000
MAX_TITLE = 200  # characters of a chapter's title in marks, file names and reports
MAX_COVER_BYTES = 16 << 20
IMAGE_TYPES = {b"\xff\xd8\xff": "image/jpeg", b"\x89PNG\r\n\x1a\n": "image/png"}
SUFFIXES = {"image/jpeg": ".jpg", "image/png": ".png"}


@dataclass(frozen=True, slots=True)
class Block:
    """A heading or a paragraph: text without markup, white space collapsed."""

    text: str
    heading: bool = False
    after_break: bool = False  # a scene break, such as a rule or three asterisks, precedes it


@dataclass(frozen=True, slots=True)
class Chapter:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Cover:
    content: bytes
    media_type: str  # image/jpeg or image/png

    @property
    def suffix(self) -> str:
        return SUFFIXES[self.media_type]


@dataclass(frozen=True, slots=True)
class Book:
    title: str
    chapters: tuple[Chapter, ...]
    author: str = ""
    language: str = ""  # BCP 47
    publisher: str = ""
    date: str = ""
    description: str = ""
    cover: Cover | None = None


def parse_cover(content: bytes) -> Cover:
    """Return the image as a cover; only its magic bytes are checked. Raises InvalidRequest."""
    if len(content) > MAX_COVER_BYTES:
        raise InvalidRequest(f"the cover is larger than {MAX_COVER_BYTES >> 20} MiB: make the image smaller")
    for magic, media_type in IMAGE_TYPES.items():
        if content.startswith(magic):
            return Cover(content, media_type)
    raise InvalidRequest("the cover must be a JPEG or PNG image: convert it, or give another with --cover")


def checked(book: Book) -> Book:
    """Return the book without chapters that have no words. Raises TextError for a book with no or too much text."""
    spoken = [replace(each, title=_short(each.title)) for each in book.chapters if _spoken(each)]
    if len(spoken) > 1 and all(block.heading for block in spoken[0].blocks):
        # A first chapter of headings only is the title page: merge it into the next one.
        spoken[:2] = [replace(spoken[1], blocks=spoken[0].blocks + spoken[1].blocks)]
    if not spoken:
        raise TextError("the book has no text: a book of images has to be recognised (OCR) first")
    if len(spoken) > MAX_CHAPTERS:
        raise TextError(f"the book has {len(spoken):,} chapters; at most {MAX_CHAPTERS:,} are supported: split it")
    characters = sum(len(block.text) for chapter in spoken for block in chapter.blocks)
    if characters > MAX_TEXT_CHARACTERS:
        raise TextError(
            f"the book has {characters:,} characters; at most {MAX_TEXT_CHARACTERS:,} are supported: split it"
        )
    return replace(book, title=_short(book.title), author=_short(book.author), chapters=tuple(spoken))


def _spoken(chapter: Chapter) -> bool:
    return any(has_words(block.text) for block in chapter.blocks)


def _short(title: str) -> str:
    title = "".join(character for character in " ".join(title.split()) if character.isprintable())
    return title if len(title) <= MAX_TITLE else f"{title[: MAX_TITLE - 1].rstrip()}…"
