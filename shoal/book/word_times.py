"""Times of the words of a spoken piece: the JSON file that a batch writes beside its audio."""

import json
from dataclasses import dataclass
from pathlib import Path


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


def read_words(audio: Path) -> tuple[TimedWord, ...]:
    """Return the words of a piece by the path of its audio; empty if their times were not recorded."""
    try:
        stored = json.loads(audio.with_suffix(".json").read_bytes())["words"]
        return tuple(TimedWord(str(each["text"]), float(each["start"]), float(each["end"])) for each in stored)
    except (OSError, ValueError, TypeError, KeyError):
        return ()
