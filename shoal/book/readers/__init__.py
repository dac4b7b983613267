"""Read a book of any supported format."""

from pathlib import Path

from shoal.book.document import Book
from shoal.book.readers.epub import read_epub
from shoal.book.readers.plain import read_markdown_book, read_text_book
from shoal.errors import InvalidRequest

READERS = {
    ".epub": read_epub,
    ".txt": read_text_book,
    ".md": read_markdown_book,
    ".markdown": read_markdown_book,
}


def read_book(path: Path) -> Book:
    """Read a book. Raises InvalidRequest for an unknown format, TextError for a file that cannot be read as a book."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InvalidRequest(f"{path.name!r} is not a book that can be read: use {', '.join(READERS)}")
    return reader(path)
