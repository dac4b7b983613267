"""Write an epub 3 with media overlays: readers highlight each sentence of the text while it is read aloud.

The text is that of the audio, as headings and paragraphs; pictures and styles of the original are omitted.
"""

import re
import uuid
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from itertools import groupby
from pathlib import Path

from shoal.book.audio_file import FORMATS, FileTags, write_audio_file
from shoal.book.document import Book
from shoal.book.timeline import TimedChapter, TimedSentence, Timeline, render
from shoal.paths import AtomicFile, output_errors

AUDIO_FORMAT = "m4a"  # AAC in mp4, which every epub 3 reader plays
PART = ".chapter.part"
XHTML = "application/xhtml+xml"
ACTIVE_CLASS = "-epub-media-overlay-active"
LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:-[A-Za-z0-9]{2,8})*")
DATE = re.compile(r"\d{4}(?:-\d\d(?:-\d\d)?)?")
# XML cannot contain these characters, not even as character references.
NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
CONTAINER = """<?xml version="1.0" encoding="utf-8"?>
<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
  <rootfiles><rootfile full-path="EPUB/package.opf" media-type="application/oebps-package+xml"/></rootfiles>
</container>
"""
STYLE = f"""body {{ font-family: serif; line-height: 1.5; margin: 5%; }}
h1 {{ font-size: 1.4em; margin: 2em 0 1em; }}
.{ACTIVE_CLASS} {{ background: #ffe9a8; color: #000; }}
"""


def write_overlay(path: Path, book: Book, timeline: Timeline, bitrate: int, work: Path) -> None:
    """Write the epub atomically. `bitrate` is in bits per second. Raises OutputError."""
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = AtomicFile(path)
        try:
            with zipfile.ZipFile(target.file, "w", zipfile.ZIP_DEFLATED) as archive:
                _write_archive(archive, book, timeline, bitrate, work)
            target.commit()
        finally:
            target.discard()


def _write_archive(archive: zipfile.ZipFile, book: Book, timeline: Timeline, bitrate: int, work: Path) -> None:
    # Readers recognise an epub by its first bytes: this entry comes first and is not compressed.
    archive.writestr("mimetype", "application/epub+zip", zipfile.ZIP_STORED)
    archive.writestr("META-INF/container.xml", CONTAINER)
    archive.writestr("EPUB/style.css", STYLE)
    archive.writestr("EPUB/nav.xhtml", _navigation(book, timeline))
    archive.writestr("EPUB/package.opf", _package(book, timeline))
    if book.cover is not None:
        archive.writestr(f"EPUB/cover{book.cover.suffix}", book.cover.content, zipfile.ZIP_STORED)
    for number, chapter in enumerate(timeline.chapters, 1):
        archive.writestr(f"EPUB/c{number}.xhtml", _document(book, chapter, number))
        archive.writestr(f"EPUB/c{number}.smil", _smil(chapter, number, timeline.rate))
        _write_audio(archive, number, chapter, timeline.rate, bitrate, work)


def _write_audio(
    archive: zipfile.ZipFile, number: int, chapter: TimedChapter, rate: int, bitrate: int, work: Path
) -> None:
    made = work / PART
    try:
        tags = FileTags({"title": chapter.planned.title})
        write_audio_file(made, work / f"{PART}.part", AUDIO_FORMAT, bitrate, rate, tags, render(chapter, rate))
        archive.write(made, f"EPUB/c{number}.{AUDIO_FORMAT}", zipfile.ZIP_STORED)
    finally:
        made.unlink(missing_ok=True)


def _package(book: Book, timeline: Timeline) -> str:
    durations = "".join(
        f'    <meta property="media:duration" refines="#s{number}">{chapter.samples / timeline.rate:.3f}s</meta>\n'
        for number, chapter in enumerate(timeline.chapters, 1)
    )
    items = "".join(_items(number) for number in range(1, len(timeline.chapters) + 1))
    spine = "".join(f'    <itemref idref="c{number}"/>\n' for number in range(1, len(timeline.chapters) + 1))
    return f"""<?xml version="1.0" encoding="utf-8"?>
<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id" xml:lang="{_language(book)}">
  <metadata xmlns:dc="http://purl.org/dc/elements/1.1/">
    <dc:identifier id="id">{_identifier(book)}</dc:identifier>
    <dc:title>{_xml(book.title)}</dc:title>
    <dc:language>{_language(book)}</dc:language>
{_optional(book)}    <meta property="dcterms:modified">{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}</meta>
    <meta property="media:active-class">{ACTIVE_CLASS}</meta>
    <meta property="media:duration">{timeline.seconds:.3f}s</meta>
{durations}  </metadata>
  <manifest>
    <item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>
    <item id="style" href="style.css" media-type="text/css"/>
{_cover_item(book)}{items}  </manifest>
  <spine>
{spine}  </spine>
</package>
"""


def _items(number: int) -> str:
    return (
        f'    <item id="c{number}" href="c{number}.xhtml" media-type="{XHTML}" media-overlay="s{number}"/>\n'
        f'    <item id="s{number}" href="c{number}.smil" media-type="application/smil+xml"/>\n'
        f'    <item id="a{number}" href="c{number}.{AUDIO_FORMAT}" media-type="{FORMATS[AUDIO_FORMAT].media_type}"/>\n'
    )


def _optional(book: Book) -> str:
    date = DATE.match(book.date)
    fields = {"creator": book.author, "publisher": book.publisher, "description": book.description}
    fields["date"] = date[0] if date else ""
    return "".join(f"    <dc:{name}>{_xml(value)}</dc:{name}>\n" for name, value in fields.items() if value)


def _cover_item(book: Book) -> str:
    if book.cover is None:
        return ""
    href, media_type = f"cover{book.cover.suffix}", book.cover.media_type
    return f'    <item id="cover" href="{href}" media-type="{media_type}" properties="cover-image"/>\n'


def _navigation(book: Book, timeline: Timeline) -> str:
    entries = "".join(
        f'      <li><a href="c{number}.xhtml">{_xml(chapter.planned.title) or number}</a></li>\n'
        for number, chapter in enumerate(timeline.chapters, 1)
    )
    body = f'  <nav epub:type="toc">\n    <ol>\n{entries}    </ol>\n  </nav>\n'
    return _page(book, book.title, body)


def _document(book: Book, chapter: TimedChapter, number: int) -> str:
    """Return the page of a chapter: a heading or paragraph per block, a span with an id per sentence."""
    blocks = groupby(chapter.sentences, key=lambda each: each.planned.sentence.block)
    body = "".join(_block(list(sentences)) for _, sentences in blocks)
    return _page(book, chapter.planned.title, f'  <section epub:type="chapter">\n{body}  </section>\n')


def _block(sentences: list[TimedSentence]) -> str:
    name = "h1" if sentences[0].planned.sentence.heading else "p"
    spans = " ".join(f'<span id="{_id(each)}">{_xml(each.planned.sentence.text)}</span>' for each in sentences)
    return f"    <{name}>{spans}</{name}>\n"


def _page(book: Book, title: str, body: str) -> str:
    language = _language(book)
    return f"""<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops"
  xml:lang="{language}" lang="{language}">
<head><title>{_xml(title) or "Untitled"}</title><link rel="stylesheet" type="text/css" href="style.css"/></head>
<body>
{body}</body>
</html>
"""


def _smil(chapter: TimedChapter, number: int, rate: int) -> str:
    return f"""<?xml version="1.0" encoding="utf-8"?>
<smil xmlns="http://www.w3.org/ns/SMIL" version="3.0">
<body>
{"".join(_pars(chapter, number, rate))}</body>
</smil>
"""


def _pars(chapter: TimedChapter, number: int, rate: int) -> Iterator[str]:
    """Yield a SMIL `par` of text and audio per sentence; it includes the pause until the next sentence."""
    ends = [each.start for each in chapter.sentences[1:]] + [chapter.samples]
    for place, (each, end) in enumerate(zip(chapter.sentences, ends, strict=True)):
        clip = f'clipBegin="{(each.start if place else 0) / rate:.3f}s" clipEnd="{end / rate:.3f}s"'
        yield (
            f'  <par id="p{each.planned.sentence.number}"><text src="c{number}.xhtml#{_id(each)}"/>'
            f'<audio src="c{number}.{AUDIO_FORMAT}" {clip}/></par>\n'
        )


def _id(sentence: TimedSentence) -> str:
    return f"t{sentence.planned.sentence.number}"


def _identifier(book: Book) -> str:
    text = "\0".join(block.text for chapter in book.chapters for block in chapter.blocks)
    return uuid.uuid5(uuid.NAMESPACE_OID, f"{book.title}\0{book.author}\0{text}").urn


def _language(book: Book) -> str:
    return book.language if LANGUAGE.fullmatch(book.language) else "und"


def _xml(text: str) -> str:
    return escape(NOT_XML.sub("", text))
