"""Books in text and Markdown files."""

from pathlib import Path

import pytest

from shoal.book.document import Book
from shoal.book.readers import read_book
from shoal.book.readers.plain import read_markdown_book, read_text_book
from shoal.errors import InvalidRequest, TextError

GUTENBERG = """The Project Gutenberg eBook of The Sea

Title: The Sea: A Tale
Author: J. Doe
Language: English

*** START OF THE PROJECT GUTENBERG EBOOK THE SEA ***

THE SEA

CONTENTS

CHAPTER I.

CHAPTER II.

CHAPTER I.

It was _very_ cold,
and dark.

"Part of the ship," he said.

* * *

Later.

CHAPTER II.
The Return

They came
home.

*** END OF THE PROJECT GUTENBERG EBOOK THE SEA ***

Licence.
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def texts(book: Book) -> dict[str, list[str]]:
    return {chapter.title: [block.text for block in chapter.blocks] for chapter in book.chapters}


def test_a_text_of_project_gutenberg_has_its_chapters_and_no_licence(tmp_path: Path) -> None:
    book = read_text_book(write(tmp_path / "sea.txt", GUTENBERG))
    assert (book.title, book.author, book.language) == ("The Sea: A Tale", "J. Doe", "en")
    assert texts(book) == {
        "The Sea: A Tale": ["THE SEA", "CONTENTS"],
        "CHAPTER I.": ["CHAPTER I.", "It was very cold, and dark.", '"Part of the ship," he said.', "Later."],
        "CHAPTER II. The Return": ["CHAPTER II. The Return", "They came home."],
    }
    assert [block.after_break for block in book.chapters[1].blocks] == [False, False, False, True]


def test_a_text_without_headings_is_one_chapter(tmp_path: Path) -> None:
    assert texts(read_text_book(write(tmp_path / "note.txt", "One line.\nAnother line."))) == {
        "note": ["One line.", "Another line."]
    }
    assert texts(read_text_book(write(tmp_path / "note.txt", "One\nline.\n\nAct naturally.\r\n\r\nYes.\n"))) == {
        "note": ["One line.", "Act naturally.", "Yes."]
    }


@pytest.mark.parametrize(
    "heading",
    [
        "Chapter 1",
        "CHAPTER XII",
        "Chapter Twenty-One: The End",
        "Part the First",
        "PROLOGUE",
        "IV.",
        "Letter 4",
        "Epilogue",
    ],
)
def test_headings_of_chapters_are_found(tmp_path: Path, heading: str) -> None:
    book = read_text_book(write(tmp_path / "a.txt", f"Before.\n\n{heading}\n\nAfter."))
    assert texts(book) == {"a": ["Before."], heading: [heading, "After."]}


def test_markdown_has_chapters_at_the_highest_level_that_repeats(tmp_path: Path) -> None:
    text = (
        "---\ntitle: 'My Book'\nauthor: Me\n---\n# Ignored *title*\n\n## One\n\nA **b**\nc.\n\n- item\n\n***\n\nD.\n\n"
        "### Deeper\n\nE.\n\n## Two\n\n> Q.\n"
    )
    book = read_markdown_book(write(tmp_path / "a.md", text))
    assert (book.title, book.author) == ("My Book", "Me")
    assert texts(book) == {
        "One": ["Ignored title", "One", "A b c.", "item.", "D.", "Deeper", "E."],
        "Two": ["Two", "Q."],
    }
    assert [block.after_break for block in book.chapters[0].blocks] == [False] * 4 + [True, False, False]


def test_what_is_no_book_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"use \.epub, \.txt, \.md"):
        read_book(tmp_path / "a.pdf")
    with pytest.raises(TextError, match="cannot read"):
        read_book(tmp_path / "a.txt")
    with pytest.raises(TextError, match="no text"):
        read_book(write(tmp_path / "a.md", "***\n"))
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(TextError, match="not UTF-8 text: invalid byte at offset 3"):
        read_book(tmp_path / "a.txt")
