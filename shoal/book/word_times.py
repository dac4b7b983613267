"""Times of the words of a spoken piece: the JSON file that a batch writes beside its audio."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word as written, with times in seconds from the start of its file."""

    text: str
    start: float
    end: float
    first: int = 0  # characters [first, last) of the text of the file
    last: int = 0

    def within(self, offset: float, first: float, last: float) -> "TimedWord":
        """Return the word with times shifted by `offset` and clamped to `first` to `last`, all in seconds."""
        start, end = (min(max(time + offset, first), last) for time in (self.start, self.end))
        return replace(self, start=round(start, 3), end=round(end, 3))


def read_words(audio: Path) -> tuple[TimedWord, ...]:
    """Return the words of a piece by the path of its audio; empty if their times were not recorded."""
    try:
        stored = json.loads(audio.with_suffix(".json").read_bytes())["words"]
        return tuple(_word(each) for each in stored)
    except (OSError, ValueError, TypeError, KeyError):
        return ()


def _word(stored: dict[str, Any]) -> TimedWord:
    text, start, end = str(stored["text"]), float(stored["start"]), float(stored["end"])
    return TimedWord(text, start, end, int(stored["first"]), int(stored["last"]))
