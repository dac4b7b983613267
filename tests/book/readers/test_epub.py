"""Epub files of publishers, and of people who mean harm."""

import struct
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shoal.book.document import Book
from shoal.book.readers.archive import MAX_DOCUMENT_BYTES, MAX_ENTRIES
from shoal.book.readers.epub import read_epub
from shoal.book.readers.markup import tokens
from shoal.book.readers.xhtml import text_blocks
from shoal.errors import TextError
from tests.book.prose import novel, write_epub

COVER = b"\xff\xd8\xff\xe0" + bytes(range(200))
CHAPTERS = {"The Storm": ["First.", "Second."], "The Calm": ["Third & last."]}


def texts(book: Book) -> dict[str, list[str]]:
    return {chapter.title: [block.text for block in chapter.blocks] for chapter in book.chapters}


def page(body: str) -> str:
    return f"<html><head><title>No</title></head><body>{body}</body></html>"


def test_metadata_cover_and_chapters_are_read(tmp_path: Path) -> None:
    book = read_epub(write_epub(tmp_path / "a.epub", CHAPTERS, cover=COVER))
    assert (book.title, book.author, book.language, book.date) == (
        "The Harbour & the Key",
        "Ann Writer",
        "en",
        "1899-05-01",
    )
    assert book.cover is not None
    assert (book.cover.content, book.cover.media_type) == (COVER, "image/jpeg")
    assert texts(book) == {title: [title, *paragraphs] for title, paragraphs in CHAPTERS.items()}
    assert [block.heading for block in book.chapters[0].blocks] == [True, False, False]


def test_chapters_begin_at_fragments_of_one_document(tmp_path: Path) -> None:
    nav = page(
        '<nav epub:type="toc"><ol><li><a href="text/c1.xhtml#a">One</a><ol><li><a href="text/c1.xhtml#b">Two</a><ol>'
        '<li><a href="text/c1.xhtml#deep">Section</a></li></ol></li></ol></li></ol></nav>'
        '<nav epub:type="landmarks"><ol><li><a href="text/c2.xhtml">Start</a></li></ol></nav>'
    )
    body = page('<p>Before.</p><h2 id="a">I</h2><p>x</p><div id="b"><p>y</p><p id="deep">z</p></div>')
    path = write_epub(tmp_path / "a.epub", CHAPTERS, **{"OEBPS/nav.xhtml": nav, "OEBPS/text/c1.xhtml": body})
    book = read_epub(path)
    assert texts(book) == {
        "The Harbour & the Key": ["Before."],
        "One": ["I", "x"],
        "Two": ["y", "z", "The Calm", "Third & last."],
    }


@pytest.mark.parametrize(
    "begin",
    [
        "<p>y</p>",  # readers show the start of a document for a fragment that it does not contain
        '<p><a name="b"/>y</p>',
        '<span epub:type="pagebreak" id="b">7</span><p>y</p>',
    ],
    ids=["missing", "name", "page"],
)
def test_a_chapter_begins_at_old_anchors_page_numbers_and_missing_fragments(tmp_path: Path, begin: str) -> None:
    nav = page(
        '<nav epub:type="toc"><ol><li><a href="text/c1.xhtml">One</a></li>'
        '<li><a href="text/c2.xhtml#b">Two</a></li></ol></nav>'
    )
    path = write_epub(tmp_path / "a.epub", CHAPTERS, **{"OEBPS/nav.xhtml": nav, "OEBPS/text/c2.xhtml": page(begin)})
    assert texts(read_epub(path)) == {"One": ["The Storm", "First.", "Second."], "Two": ["y"]}


def test_an_epub_2_has_its_contents_in_an_ncx(tmp_path: Path) -> None:
    package = """<package version="2.0"><metadata><dc:title>O&#0;l&#7;d</dc:title>
    <meta name="cover" content="img"/></metadata>
    <manifest><item id="ncx" href="toc.ncx" media-type="application/x-dtbncx+xml"/>
    <item id="far" href="https://x.invalid/film.mp4" media-type="video/mp4"/>
    <item id="img" href="my%20cover.png" media-type="image/png"/>
    <item id="c1" href="text/c1.xhtml" media-type="application/xhtml+xml"/>
    <item id="c2" href="text/c2.xhtml" media-type="application/xhtml+xml"/></manifest>
    <spine toc="ncx"><itemref idref="c1"/><itemref idref="c2" linear="no"/></spine></package>"""
    ncx = """<?xml version="1.0"?><!DOCTYPE ncx PUBLIC "-//NISO//DTD ncx 2005-1//EN" "http://x.invalid/ncx.dtd">
    <ncx:ncx xmlns:ncx="http://www.daisy.org/z3986/2005/ncx/"><ncx:navMap><ncx:navPoint><ncx:navLabel>
    <ncx:text>A &#8211; B</ncx:text></ncx:navLabel><ncx:content src="text/c1.xhtml"/>
    </ncx:navPoint></ncx:navMap></ncx:ncx>"""
    png = b"\x89PNG\r\n\x1a\n123"
    extra = {"OEBPS/content.opf": package, "OEBPS/toc.ncx": ncx, "OEBPS/my cover.png": png}
    book = read_epub(write_epub(tmp_path / "a.epub", CHAPTERS, **extra))
    assert texts(book) == {"A – B": ["The Storm", "First.", "Second."]}
    assert book.title in ("Old", "O\ufffdld")
    assert book.cover is not None
    assert book.cover.media_type == "image/png"


def test_notes_page_numbers_and_scripts_are_not_read() -> None:
    body = page(
        '<p>A<sup><a href="#n1">1</a></sup> B<a epub:type="noteref" href="#n2">*</a>.'
        '<span epub:type="pagebreak">12</span></p>'
        '<aside role="doc-footnote"><p>Note. <aside>in it</aside> more</p></aside>'
        '<script>if (1 < 2) "<p>";</script>'
        "<style>p { }</style><!-- <p>no</p> --><p>x<sup>2</sup> is&nbsp;<em>not</em>\n a <a href='#top'>link</a></p>"
        '<hr/><p title="a > b">Next<br/>line</p><p>* * *</p><p>Last</p><h1>One<br/>Two</h1><svg><text>no</text></svg>'
        "<p>漢<ruby>字<rt>じ</rt></ruby>"
    )
    found = text_blocks(body)
    assert [block.text for block in found] == [
        "A B.",
        "x2 is not a link",
        "Next line",
        "Last",
        "One. Two",
        "漢字",
    ]
    assert [block.after_break for block in found] == [False, False, True, True, False, False]
    assert [block.level for block in found] == [0, 0, 0, 0, 1, 0]


def test_text_that_readers_hide_is_not_read() -> None:
    found = text_blocks('<p>a</p><div hidden="hidden"><p>No.</p><div>No.</div></div><p>b<i hidden="">No.</i></p>')
    assert [block.text for block in found] == ["a", "b"]


def test_documents_that_the_manifest_lacks_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_epub(tmp_path / "a.epub", CHAPTERS)
    with zipfile.ZipFile(path) as archive:
        package = archive.read("OEBPS/content.opf").decode()
    missing = '<spine><itemref idref="lost"/><itemref idref="gone"/>'
    damaged = package.replace("<spine>", missing)
    assert damaged != package
    book = read_epub(write_epub(path, CHAPTERS, **{"OEBPS/content.opf": damaged}))
    assert list(texts(book)) == list(CHAPTERS)
    assert "'lost' and 1 other, which it does not contain" in caplog.text


def test_damaged_markup_is_read_as_far_as_it_goes() -> None:
    assert [block.text for block in text_blocks("<p>1 < 2 <b>bold<p>next</i> one</p <p>&unknown; &amp;")] == [
        "1 < 2 bold",
        "next one",
        "&unknown; &",
    ]
    assert [block.text for block in text_blocks("<p>a<![CDATA[<b>]]>c</p><!-- never closed <p>d</p>")] == ["a<b>c"]


@pytest.mark.parametrize(
    "unit", ["<a ", "<!--", "<![CDATA[", "<a b='", '<a b="', "</a ", "<!a", "&#", "<br/>", "<title>"]
)
def test_hostile_markup_takes_linear_time(unit: str) -> None:
    """Quadratic time would be minutes: html.parser takes that long for six of these."""
    text_blocks("<h1>" + unit * 20_000)


@pytest.mark.parametrize(
    ("entry", "content", "message"),
    [
        ("OEBPS/text/c1.xhtml", b"\0" * (MAX_DOCUMENT_BYTES + 1), "more than 8 MiB"),
        (
            "OEBPS/text/c1.xhtml",
            '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><p>&a;</p>',
            "declares entities",
        ),
        ("OEBPS/content.opf", '<!DOCTYPE x [\n<!ENTITY a "b">\n]><package/>', "declares entities"),
        ("../../evil.xhtml", "x", "outside of its own directory"),
        ("C:\\evil.xhtml", "x", "outside of its own directory"),
        ("META-INF/container.xml", '<rootfile full-path="../../../etc/passwd"/>', "outside of itself"),
        ("META-INF/container.xml", '<rootfile full-path="http://x.invalid/a.opf"/>', "outside of itself"),
        ("META-INF/container.xml", "<x/>", "names no package document"),
        ("OEBPS/content.opf", "<package><spine/></package>", "lists no documents"),
        ("OEBPS/content.opf", '<package><spine><itemref idref="x"/></spine></package>', "does not contain"),
        (
            "META-INF/encryption.xml",
            '<enc:CipherReference URI="OEBPS/text/c1.xhtml"/>',
            "protected",
        ),
        ("OEBPS/text/c1.xhtml", b"\xff\xff", "cannot be decoded"),
    ],
)
def test_hostile_and_damaged_books_are_refused(tmp_path: Path, entry: str, content: str | bytes, message: str) -> None:
    path = write_epub(tmp_path / "a.epub", CHAPTERS, **{entry: content})
    tracemalloc.start()
    with pytest.raises(TextError, match=message):
        read_epub(path)
    assert tracemalloc.get_traced_memory()[1] < 48 << 20
    tracemalloc.stop()


def test_a_directory_that_is_too_long_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write_epub(tmp_path / "a.epub", CHAPTERS)
    content = bytearray(path.read_bytes())
    end = content.rfind(b"PK\x05\x06")
    struct.pack_into("<2H", content, end + 8, MAX_ENTRIES + 1, MAX_ENTRIES + 1)
    path.write_bytes(content)
    with pytest.raises(TextError, match="20,001 entries"):
        read_epub(path)
    path.write_bytes(content[:end] + b"PK\x06\x07" + bytes(16) + content[end:])
    with pytest.raises(TextError, match="zip64"):
        read_epub(path)


def test_files_that_are_no_epub_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.epub"
    with pytest.raises(TextError, match="cannot read"):
        read_epub(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(TextError, match="not an epub"):
        read_epub(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises(TextError, match=r"container\.xml' is missing"):
        read_epub(path)
    with pytest.raises(TextError, match="no text"):
        read_epub(write_epub(path, {"Cover": []}, **{"OEBPS/text/c1.xhtml": page("<img src='a.png'/>")}))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 2_500), replacement=st.binary(max_size=8), cut=st.integers(0, 2_500))
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, at: int, replacement: bytes, cut: int) -> None:
    path = tmp_path / "a.epub"
    content = bytearray(write_epub(path, CHAPTERS).read_bytes())
    content[at : at + len(replacement)] = replacement
    path.write_bytes(content[: len(content) - cut if cut < 50 else len(content)])
    with suppress(TextError):
        assert read_epub(path).chapters


@settings(max_examples=60, deadline=None)
@example("a<![CDATA[]]>b")
@example("<![CDATA[")
@given(st.text(alphabet=list("<>/!-[]ab ='\"&;#CDAT\n"), max_size=200))
def test_any_markup_has_tokens(document: str) -> None:
    for token in tokens(document):
        assert token != ""


def test_a_long_novel_keeps_all_its_words(tmp_path: Path) -> None:
    chapters = novel(20_000, 8)
    book = read_epub(write_epub(tmp_path / "a.epub", chapters))
    assert texts(book) == {title: [title, *paragraphs] for title, paragraphs in chapters.items()}
