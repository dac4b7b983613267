"""Subtitles of word times: SubRip (.srt), WebVTT (.vtt) and JSON."""

import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from shoal.api.word_events import with_spaces
from shoal.errors import InvalidRequest
from shoal.speech import Word

# Limits of a cue that can be read in time: two lines of 42 characters.
MAX_CHARACTERS = 84
MAX_SECONDS = 7.0
MAX_PAUSE_SECONDS = 0.8
SENTENCE_ENDS = (".", "!", "?", "…", "。", "！", "？")
CLOSERS = "\"'”’»)]*_`"
ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]\w{1,30});")
# Markdown emphasis at the start or end of a word; the marks inside "5*3" and "snake_case" are kept.
EMPHASIS = re.compile(r"(?<![^\W_])(?<![*_`~])(?:[*_`]|~~)+|(?:[*_`]|~~)+(?![^\W_]|[*_`~])")


def cues(words: Iterable[Word]) -> Iterator[list[Word]]:
    """Yield the words of each subtitle: at most two lines, cut after sentences and at pauses."""
    cue: list[Word] = []
    for word in words:
        if cue and _ends(cue, word):
            yield cue
            cue = []
        cue.append(word)
    if cue:
        yield cue


def _ends(cue: Sequence[Word], following: Word) -> bool:
    """Return whether a subtitle is complete before the word that follows."""
    last = cue[-1]
    return (
        last.text.rstrip(CLOSERS).endswith(SENTENCE_ENDS)
        or following.start - last.end > MAX_PAUSE_SECONDS
        or following.end - cue[0].start > MAX_SECONDS
        or len(_text([*cue, following])) > MAX_CHARACTERS
    )


def _text(cue: Sequence[Word]) -> str:
    return "".join(_shown(word.text) + space for word, space in with_spaces(cue)).rstrip()


def _shown(word: str) -> str:
    """Return a word without the marks of Markdown, with characters in place of entities: "**A&amp;B**" is "A&B"."""
    bare = EMPHASIS.sub("", word)
    return ENTITY.sub(lambda entity: html.unescape(entity[0]), bare or word)


def to_srt(words: Sequence[Word]) -> str:
    blocks = (
        f"{number}\n{timestamp(cue[0].start, ',')} --> {timestamp(cue[-1].end, ',')}\n{_text(cue)}\n"
        for number, cue in enumerate(cues(words), start=1)
    )
    return "\n".join(blocks)


def to_vtt(words: Sequence[Word]) -> str:
    """Return WebVTT in which every word after the first of a cue has its own time."""
    return "\n".join(["WEBVTT\n", *map(_vtt_cue, cues(words))])


def _vtt_cue(cue: Sequence[Word]) -> str:
    parts = [
        f"{f'<{timestamp(word.start)}>' if number else ''}{html.escape(_shown(word.text), quote=False)}{space}"
        for number, (word, space) in enumerate(with_spaces(cue))
    ]
    return f"{timestamp(cue[0].start)} --> {timestamp(cue[-1].end)}\n{''.join(parts).rstrip()}\n"


def to_json(words: Sequence[Word]) -> str:
    """Return an object with the words; `first` and `last` are character positions in the text."""
    return json.dumps({"words": [asdict(word) for word in words]}, ensure_ascii=False, indent=1) + "\n"


def timestamp(seconds: float, mark: str = ".") -> str:
    """Return a time as HH:MM:SS.mmm; SubRip has a comma for the point."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"


FORMATS: dict[str, Callable[[Sequence[Word]], str]] = {"srt": to_srt, "vtt": to_vtt, "json": to_json}


def subtitle_format(path: Path) -> Callable[[Sequence[Word]], str]:
    """Return the function that writes the format of a file name. Raises InvalidRequest for another suffix."""
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        raise InvalidRequest(f"{path}: subtitles are .{', .'.join(FORMATS)}, not {path.suffix or 'without a suffix'}")
    return FORMATS[suffix]


def scaled(words: Iterable[Word], speed: float) -> tuple[Word, ...]:
    """Return the words of audio that is played `speed` times as fast."""
    found = tuple(words)
    if speed == 1.0:
        return found
    return tuple(
        Word(each.text, round(each.start / speed, 3), round(each.end / speed, 3), each.first, each.last)
        for each in found
    )
