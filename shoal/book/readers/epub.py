"""Read an epub 2 or 3 file: metadata, cover, table of contents and the text of its documents in reading order."""

import logging
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from shoal.book.document import MAX_COVER_BYTES, Block, Book, Chapter, Cover, checked, parse_cover
from shoal.book.readers.archive import Archive, open_archive
from shoal.book.readers.markup import EndTag, StartTag, Token, decode, tokens
from shoal.book.readers.xhtml import TextBlock, text_blocks
from shoal.errors import InvalidRequest, TextError, counted
from shoal.text.markdown import strip_tags

logger = logging.getLogger(__name__)

CONTAINER, ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
PACKAGE_TYPE = "application/oebps-package+xml"
CONTENT_TYPES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml", "text/x-oeb1-document")
METADATA = ("title", "creator", "language", "publisher", "date", "description")
ANCHOR = re.compile(r"""\b(?:id|name)\s*=\s*["']([^"'<>]*)""", re.IGNORECASE)
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,30}:")
MAX_CONTENTS_DEPTH = 2  # parts and their chapters; sections below them are not chapters


@dataclass(frozen=True, slots=True)
class ManifestItem:
    path: str  # path in the archive
    media_type: str
    properties: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ContentsEntry:
    """Entry of the table of contents: a document and, if it is not the whole of it, the id of an element."""

    path: str
    fragment: str
    title: str


@dataclass(slots=True)
class Package:
    """Package document: metadata, manifest by id, and the ids of the documents in reading order."""

    directory: str
    metadata: dict[str, list[str]] = field(default_factory=dict)
    items: dict[str, ManifestItem] = field(default_factory=dict)
    spine: list[str] = field(default_factory=list)
    contents_id: str = ""  # manifest id of the NCX, epub 2's table of contents
    cover_id: str = ""

    def first(self, name: str) -> str:
        return next(iter(self.metadata.get(name, ())), "")

    def with_property(self, name: str) -> ManifestItem | None:
        return next((item for item in self.items.values() if name in item.properties), None)


def read_epub(path: Path) -> Book:
    """Read an epub. Raises TextError if it is not one, is damaged, protected, or exceeds the limits of a book."""
    with open_archive(path) as archive:
        package = read_package(archive)
        documents = list(_documents(package))
        _check_not_protected(archive, documents)
        chapters = _chapters(archive, documents, _contents(archive, package), package.first("title") or path.stem)
        return checked(
            Book(
                package.first("title") or path.stem,
                tuple(chapters),
                author=", ".join(package.metadata.get("creator", ())),
                language=package.first("language"),
                publisher=package.first("publisher"),
                date=package.first("date"),
                description=strip_tags(package.first("description")),
                cover=_cover(archive, package),
            )
        )


def read_package(archive: Archive) -> Package:
    """Return the package document that the archive's container names. Raises TextError."""
    starts = (each for each in tokens(_text(archive, CONTAINER)) if isinstance(each, StartTag))
    roots = [tag.attributes for tag in starts if tag.name == "rootfile" and "full-path" in tag.attributes]
    named = [root for root in roots if root.get("media-type", PACKAGE_TYPE) == PACKAGE_TYPE]
    if not named:
        raise TextError(f"not an epub file: {CONTAINER} names no package document")
    path = _resolve("", named[0]["full-path"])
    package = Package(posixpath.dirname(path))
    _PackageReader(package).read(tokens(_text(archive, path)))
    if not package.spine:
        raise TextError(f"not an epub file: {path!r:.200} lists no documents to read")
    return package


class _PackageReader:
    def __init__(self, package: Package) -> None:
        self._package = package
        self._metadata_name = ""

    def read(self, document: Iterable[Token]) -> None:
        for token in document:
            if isinstance(token, StartTag):
                self._start(token)
            elif isinstance(token, EndTag):
                self._metadata_name = ""
            elif self._metadata_name and token.strip():
                self._package.metadata.setdefault(self._metadata_name, []).append(" ".join(token.split()))

    def _start(self, tag: StartTag) -> None:
        values, package = tag.attributes, self._package
        if tag.name in METADATA and not tag.empty:
            self._metadata_name = tag.name
        elif tag.name == "meta" and values.get("name") == "cover":
            package.cover_id = values.get("content", "")
        elif tag.name == "item" and "id" in values and "href" in values and not _is_remote(values["href"]):
            path = _resolve(package.directory, values["href"])
            properties = tuple(values.get("properties", "").split())
            package.items[values["id"]] = ManifestItem(path, values.get("media-type", ""), properties)
        elif tag.name == "spine":
            package.contents_id = values.get("toc", "")
        elif tag.name == "itemref" and values.get("linear") != "no":
            package.spine.append(values.get("idref", ""))


def _documents(package: Package) -> Iterator[str]:
    """Yield the paths of the documents in reading order, without a table of contents that is one of them.

    Ids without a manifest item are skipped, as reading systems do. Raises TextError if no other is left.
    """
    ids = dict.fromkeys(package.spine)
    unknown = [id for id in ids if id not in package.items]
    if unknown:
        names = f"{unknown[0]!r:.200}" + (f" and {counted(len(unknown) - 1, 'other')}" if len(unknown) > 1 else "")
        if len(unknown) == len(ids):
            raise TextError(f"the book is damaged: its reading order names {names}, which it does not contain")
        logger.warning("the reading order of the book names %s, which it does not contain: skipped", names)
    for id in ids:
        item = package.items.get(id)
        if item is not None and item.media_type in CONTENT_TYPES and "nav" not in item.properties:
            yield item.path


def _check_not_protected(archive: Archive, documents: list[str]) -> None:
    """Raise TextError if documents are encrypted; fonts of readable books often are."""
    if ENCRYPTION not in archive:
        return
    tags = (each for each in tokens(_text(archive, ENCRYPTION)) if isinstance(each, StartTag))
    encrypted = {unquote(tag.attributes.get("uri", "")) for tag in tags if tag.name == "cipherreference"}
    if encrypted.intersection(documents):
        raise TextError("the book is protected (DRM): only books without protection can be read")


def _contents(archive: Archive, package: Package) -> list[ContentsEntry]:
    """Return the table of contents of epub 3, else of epub 2; empty if there is none."""
    nav, ncx = package.with_property("nav"), package.items.get(package.contents_id)
    for item, parse in ((nav, _nav_entries), (ncx, _ncx_entries)):
        if item is not None and item.path in archive:
            directory = posixpath.dirname(item.path)
            found = list(parse(tokens(_text(archive, item.path))))
            if found:
                return [_entry(directory, href, title) for href, title in found if not _is_remote(href)]
    return []


def _entry(directory: str, href: str, title: str) -> ContentsEntry:
    path, _, fragment = href.partition("#")
    return ContentsEntry(_resolve(directory, path), unquote(fragment), " ".join(title.split()))


def _nav_entries(document: Iterable[Token]) -> Iterator[tuple[str, str]]:
    """Yield (href, title) of the `toc` of a navigation document: links in nested lists."""
    inside, depth, href, title = False, 0, "", list[str]()
    for token in document:
        if isinstance(token, StartTag):
            if token.name == "nav":
                inside = "toc" in token.attributes.get("epub:type", "toc").split()
            depth += token.name == "ol"
            if token.name == "a" and inside and depth <= MAX_CONTENTS_DEPTH:
                href, title = token.attributes.get("href", ""), []
        elif isinstance(token, str):
            title.append(token)
        else:
            depth -= token.name == "ol"
            if token.name == "a" and href:
                yield href, "".join(title)
            href, inside = "" if token.name == "a" else href, inside and token.name != "nav"


def _ncx_entries(document: Iterable[Token]) -> Iterator[tuple[str, str]]:
    """Yield (href, title) of the navMap of an NCX document: nested points, each with a label before its content."""
    depth, label, inside = 0, list[str](), False
    for token in document:
        if isinstance(token, StartTag):
            depth += token.name == "navpoint"
            if token.name == "navlabel":
                label, inside = [], True
            elif token.name == "content" and 0 < depth <= MAX_CONTENTS_DEPTH and "src" in token.attributes:
                yield token.attributes["src"], "".join(label)
        elif isinstance(token, str):
            if inside:
                label.append(token)
        else:
            depth -= token.name == "navpoint"
            inside = inside and token.name != "navlabel"


def _chapters(archive: Archive, documents: list[str], contents: list[ContentsEntry], title: str) -> Iterator[Chapter]:
    """Yield a chapter per entry of the table of contents; without one, per document."""
    begins = {(entry.path, entry.fragment): entry.title for entry in reversed(contents)}
    entries = defaultdict[str, list[ContentsEntry]](list)
    for entry in contents:
        entries[entry.path].append(entry)
    current, blocks = title, list[Block]()
    for path in documents:
        document = _text(archive, path)
        if lost := _unknown_target(entries[path], document):
            begins[path, ""] = lost.title  # as browsers do
        for number, block in enumerate(text_blocks(document)):
            begun = _begun(begins, path, block, first=number == 0)
            if begun is None and not contents and number == 0:
                begun = block.text if block.level else posixpath.splitext(posixpath.basename(path))[0]
            if begun is not None:
                yield Chapter(current, tuple(blocks))
                current, blocks = begun or block.text, []
            blocks.append(Block(block.text, block.level > 0, block.after_break))
    yield Chapter(current, tuple(blocks))


def _unknown_target(entries: list[ContentsEntry], document: str) -> ContentsEntry | None:
    """Return the first entry with a fragment that the document does not contain, if none begins at its start."""
    if not all(entry.fragment for entry in entries):
        return None
    anchors = set(ANCHOR.findall(document))
    return next((entry for entry in entries if entry.fragment not in anchors), None)


def _begun(begins: dict[tuple[str, str], str], path: str, block: TextBlock, *, first: bool) -> str | None:
    """Return the title of the chapter that begins with a block, or None."""
    fragments = [*(("",) if first else ()), *sorted(block.ids)]
    titles = [begins.pop((path, fragment)) for fragment in fragments if (path, fragment) in begins]
    return titles[-1] if titles else None


def _cover(archive: Archive, package: Package) -> Cover | None:
    """Return the cover if it is a JPEG or PNG image of ordinary size; a book without its cover is still a book."""
    item = package.with_property("cover-image") or package.items.get(package.cover_id)
    if item is None or item.path not in archive:
        return None
    try:
        return parse_cover(archive.read(item.path, MAX_COVER_BYTES))
    except InvalidRequest:
        return None


def _is_remote(href: str) -> bool:
    """Return whether a reference has a URL scheme, such as a video on a server. These are never fetched."""
    return SCHEME.match(href) is not None


def _resolve(directory: str, href: str) -> str:
    """Return the name of the entry that a reference of a document in `directory` points to. Raises TextError."""
    path = posixpath.normpath(posixpath.join(directory, unquote(href))) if href else directory
    if path.startswith(("/", "..")) or _is_remote(href):
        raise TextError(f"the book refers to {href!r:.200} outside of itself and is refused")
    return path


def _text(archive: Archive, name: str) -> str:
    return decode(archive.read(name), name)
