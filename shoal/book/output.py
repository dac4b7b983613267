"""Write a timeline as one audio file with chapter marks, or as a folder with one file per chapter."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from shoal.book.audio_file import FORMATS, ChapterMark, FileTags, write_audio_file
from shoal.book.document import Book
from shoal.book.timeline import TimedChapter, Timeline, render
from shoal.errors import InvalidRequest
from shoal.paths import atomic_write, output_errors

FORMAT_OF_SUFFIX = {".m4b": "m4b", ".m4a": "m4a", ".mp3": "mp3", ".opus": "opus", ".ogg": "opus"}
FOLDER_FORMAT = "mp3"
PART = ".audio.part"
PLAYLIST = "book.m3u8"
AUDIOBOOK = "2"  # media type of iTunes
UNSAFE_IN_NAMES = re.compile(r'[\x00-\x1f<>:"/\\|?*]+')


@dataclass(frozen=True, slots=True)
class BookTarget:
    """Output path of a book: a file, or a folder with a file per chapter."""

    path: Path
    format: str
    bitrate: int  # bits per second
    folder: bool

    @property
    def work(self) -> Path:
        """The default work folder: beside the output, and on the same file system."""
        return self.path.with_name(f"{self.path.name}.work")

    def check_chapters(self, count: int) -> None:
        """Raise InvalidRequest if one file cannot hold the marks of this many chapters."""
        most = FORMATS[self.format].max_chapters
        if not self.folder and most is not None and count > most:
            raise InvalidRequest(
                f"{count:,} chapters: a file of {self.format} holds at most {most:,} chapter marks; use .m4b, or a "
                "folder for a file per chapter"
            )


def parse_target(path: Path, format: str | None, kilobits: int | None) -> BookTarget:
    """Return the target of `-o`, `--format` and `--bitrate`. Raises InvalidRequest."""
    suffix = path.suffix.lower()
    folder = path.is_dir() or not suffix
    if not folder and suffix not in FORMAT_OF_SUFFIX:
        known = ", ".join(FORMAT_OF_SUFFIX)
        raise InvalidRequest(f"{path.name!r} has no known suffix: use {known}, or a folder for a file per chapter")
    name = format or (FOLDER_FORMAT if folder else FORMAT_OF_SUFFIX[suffix])
    if name not in FORMATS:
        raise InvalidRequest(f"unknown format {name!r}: use {', '.join(FORMATS)}")
    if not folder and name != FORMAT_OF_SUFFIX[suffix]:
        raise InvalidRequest(f"--format {name} and the suffix of {path.name!r} differ: give only one of them")
    bitrate = FORMATS[name].bitrate if kilobits is None else FORMATS[name].limits.check_bitrate(1000 * kilobits)
    assert bitrate is not None
    return BookTarget(path, name, bitrate, folder)


def write_book(target: BookTarget, book: Book, timeline: Timeline, work: Path) -> list[Path]:
    """Write the book and return the paths of its audio files. Each file is renamed into place when complete.

    Raises OutputError.
    """
    if not target.folder:
        with output_errors(target.path):
            target.path.parent.mkdir(parents=True, exist_ok=True)
        samples = chain.from_iterable(render(chapter, timeline.rate) for chapter in timeline.chapters)
        tags = FileTags(_book_tags(book), tuple(_marks(timeline)), book.cover)
        write_audio_file(target.path, work / PART, target.format, target.bitrate, timeline.rate, tags, samples)
        return [target.path]
    with output_errors(target.path):
        target.path.mkdir(parents=True, exist_ok=True)
    paths = [_write_chapter(target, book, timeline, chapter, work) for chapter in timeline.chapters]
    _write_playlist(target.path, book, timeline, paths)
    if book.cover is not None:
        atomic_write(target.path / f"cover{book.cover.suffix}", book.cover.content)
    return paths


def _write_chapter(target: BookTarget, book: Book, timeline: Timeline, chapter: TimedChapter, work: Path) -> Path:
    planned = chapter.planned
    path = target.path / f"{chapter_name(book, chapter)}.{target.format}"
    metadata = _book_tags(book) | {"title": planned.title, "track": f"{planned.number}/{len(book.chapters)}"}
    samples = render(chapter, timeline.rate)
    tags = FileTags(metadata, cover=book.cover)
    write_audio_file(path, work / PART, target.format, target.bitrate, timeline.rate, tags, samples)
    return path


def chapter_name(book: Book, chapter: TimedChapter) -> str:
    """Return the file name of a chapter without suffix: its number, padded so that names sort, and its title."""
    number, digits = chapter.planned.number, max(2, len(str(len(book.chapters))))
    title = " ".join(UNSAFE_IN_NAMES.sub(" ", chapter.planned.title)[:80].split()).strip(" .")
    return f"{number:0{digits}d} {title}".strip()


def _book_tags(book: Book) -> dict[str, str]:
    return {
        "title": book.title,
        "album": book.title,
        "artist": book.author,
        "album_artist": book.author,
        "genre": "Audiobook",
        "date": book.date[:10],
        "publisher": book.publisher,
        "comment": book.description[:1000],
        "media_type": AUDIOBOOK,
    }


def _marks(timeline: Timeline) -> Iterator[ChapterMark]:
    for start, chapter in timeline.starts():
        yield ChapterMark(start, start + chapter.samples / timeline.rate, chapter.planned.title)


def _write_playlist(folder: Path, book: Book, timeline: Timeline, paths: list[Path]) -> None:
    lines = ["#EXTM3U", f"#PLAYLIST:{book.title}"]
    for chapter, path in zip(timeline.chapters, paths, strict=True):
        lines += [f"#EXTINF:{chapter.samples / timeline.rate:.3f},{chapter.planned.title}", path.name]
    atomic_write(folder / PLAYLIST, ("\n".join(lines) + "\n").encode())
