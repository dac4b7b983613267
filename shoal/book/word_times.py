"""Times of the words of a spoken piece: a file beside its audio in the work folder."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.paths import atomic_write
from shoal.speech import Word

SUFFIX = ".words.json"


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word as it was written, in seconds from the start of the file that it is in."""

    text: str
    start: float
    end: float

    def within(self, offset: float, first: float, last: float) -> "TimedWord":
        """Return the word moved by `offset` seconds and cut to what lies between `first` and `last`."""
        start, end = (min(max(time + offset, first), last) for time in (self.start, self.end))
        return TimedWord(self.text, round(start, 3), round(end, 3))


def write_words(folder: Path, piece: str, words: Iterable[Word]) -> None:
    """Store the words of a piece. Raises OutputError."""
    content = [[word.text, round(word.start, 3), round(word.end, 3)] for word in words]
    atomic_write(folder / f"{piece}{SUFFIX}", json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))


def read_words(audio: Path) -> tuple[TimedWord, ...]:
    """Return the words of a piece by the path of its audio; empty if their times were not recorded."""
    try:
        stored = json.loads(audio.with_name(f"{audio.stem}{SUFFIX}").read_bytes())
        return tuple(TimedWord(str(text), float(start), float(end)) for text, start, end in stored)
    except (OSError, ValueError, TypeError):
        return ()
