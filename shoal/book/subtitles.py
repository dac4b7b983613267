"""Subtitles of a book: JSON with a cue per sentence, SubRip and WebVTT with cues of two lines at most."""

import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

from shoal.api.subtitles import timestamp
from shoal.audio.guard import reading_seconds
from shoal.book.document import Book
from shoal.book.output import BookTarget, chapter_name
from shoal.book.timeline import TimedChapter, Timeline
from shoal.book.word_times import TimedWord
from shoal.errors import InvalidRequest
from shoal.paths import atomic_write
from shoal.text.split import split_text
from shoal.text.words import bare_word, written_words

LINE_CHARACTERS, LINES = 42, 2  # size of a cue on screen, as subtitling guides recommend


@dataclass(frozen=True, slots=True)
class Cue:
    """A sentence with its times, in seconds from the start of its file."""

    chapter: int
    sentence: int
    start: float
    end: float
    text: str
    words: tuple[TimedWord, ...] = ()  # empty if the times of words are not known


@dataclass(frozen=True, slots=True)
class SubtitleTarget:
    """Format of the subtitles, and their file; None: beside each audio file, under its name."""

    format: str
    path: Path | None


def parse_subtitles(value: str, target: BookTarget) -> SubtitleTarget:
    """Return the target of `--subtitles`: a format, or a file whose suffix is one. Raises InvalidRequest."""
    path = None if value in FORMATS else Path(value)
    format = value if path is None else path.suffix.lower().removeprefix(".")
    if format not in FORMATS:
        raise InvalidRequest(f"unknown subtitles {value!r}: use {', '.join(FORMATS)}, or a file with such a suffix")
    if path is not None and target.folder:
        raise InvalidRequest(f"a folder has subtitles per chapter: use --subtitles {format}")
    return SubtitleTarget(format, path)


def write_subtitles(where: SubtitleTarget, target: BookTarget, book: Book, timeline: Timeline) -> list[Path]:
    """Write one file for the book, or with a folder one per chapter; return their paths. Raises OutputError."""
    if not target.folder:
        path = where.path or target.path.with_suffix(f".{where.format}")
        cues = [cue for start, chapter in timeline.starts() for cue in chapter_cues(chapter, timeline.rate, start)]
        atomic_write(path, FORMATS[where.format](cues).encode())
        return [path]
    paths = []
    for chapter in timeline.chapters:
        paths.append(target.path / f"{chapter_name(book, chapter)}.{where.format}")
        atomic_write(paths[-1], FORMATS[where.format](list(chapter_cues(chapter, timeline.rate))).encode())
    return paths


def chapter_cues(chapter: TimedChapter, rate: int, start: float = 0.0) -> Iterator[Cue]:
    """Yield the sentences of a chapter that begins at second `start` of its file."""
    for each in chapter.sentences:
        sentence = each.planned.sentence
        begin, end = (round(start + samples / rate, 3) for samples in (each.start, each.end))
        words = (word.within(start, begin, end) for word in each.words(rate))
        named = tuple(as_written(sentence.text, list(words)))
        yield Cue(chapter.planned.number, sentence.number, begin, end, sentence.text, named)


def as_written(text: str, words: list[TimedWord]) -> list[TimedWord]:
    """Return the words as they are written in the sentence, with marks beside them and positions in it.

    The positions of spoken words differ: quotes are not spoken, and a short sentence shares a file with the next one.
    """
    spoken = [" "] * len(text)
    for each in written_words(text):
        spoken[each.first : each.last] = each.text
    readable, found, at = "".join(spoken), list[TimedWord](), 0
    for word in words:
        first, at = _place(readable, bare_word(word.text), at)
        found.append(replace(word, text=text[first:at] or word.text, first=first, last=at))
    return found


def _place(text: str, word: str, at: int) -> tuple[int, int]:
    """Return the span of the first `word` from `at` on, with the marks beside it; empty, at `at`, if not found."""
    first = text.find(word, at)
    if first < 0:
        return at, at
    last = first + len(word)
    while first > at and _is_mark(text[first - 1]):
        first -= 1
    while last < len(text) and _is_mark(text[last]):
        last += 1
    return first, last


def _is_mark(character: str) -> bool:
    return not character.isalnum() and not character.isspace()


def short_cues(cue: Cue) -> Iterator[Cue]:
    """Yield the parts of a long sentence, divided at its clauses, from the time of its first word on."""
    parts = _parts(cue.text)
    starts = [cue.start, *_part_starts(cue, parts)[1:], cue.end]
    for part, (start, end) in zip(parts, pairwise(starts), strict=True):
        yield Cue(cue.chapter, cue.sentence, start, end, part)


def _parts(text: str) -> list[str]:
    """Divide a text into as few parts as fit on screen, of similar length if its clauses permit."""
    parts = split_text(text, LINES * LINE_CHARACTERS)
    similar = len(text.encode("utf-8", "replace")) // len(parts) + LINE_CHARACTERS // 4
    even = split_text(text, min(similar, LINES * LINE_CHARACTERS))
    return even if len(even) == len(parts) else parts


def _part_starts(cue: Cue, parts: list[str]) -> list[float]:
    """Return when each part begins: when its first word does, or estimated from the time to read what precedes it."""
    if cue.words:
        ends = accumulate(parts[:-1], lambda at, part: max(at, cue.text.find(part, at)) + len(part), initial=0)
        return [next((word.start for word in cue.words if word.first >= end), cue.end) for end in ends]
    weights = [reading_seconds(part) for part in parts]
    speed = (cue.end - cue.start) / (sum(weights) or 1.0)
    return [round(cue.start + speed * before, 3) for before in accumulate(weights[:-1], initial=0.0)]


def _srt(cues: list[Cue]) -> str:
    return "\n".join(
        f"{number}\n{timestamp(cue.start, ',')} --> {timestamp(cue.end, ',')}\n{_wrapped(cue.text)}\n"
        for number, cue in enumerate((part for cue in cues for part in short_cues(cue)), 1)
    )


def _vtt(cues: list[Cue]) -> str:
    def escaped(text: str) -> str:
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

    return "WEBVTT\n\n" + "\n".join(
        f"{cue.chapter}:{cue.sentence}\n{timestamp(cue.start)} --> {timestamp(cue.end)}\n"
        f"{_wrapped(escaped(cue.text))}\n"
        for sentence in cues
        for cue in short_cues(sentence)
    )


def _json(cues: list[Cue]) -> str:
    return json.dumps({"sentences": [asdict(cue) for cue in cues]}, ensure_ascii=False, indent=1) + "\n"


FORMATS: dict[str, Callable[[list[Cue]], str]] = {"srt": _srt, "vtt": _vtt, "json": _json}


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False))
