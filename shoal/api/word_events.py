"""Word times in the forms of the APIs: words, Fish's segments, ElevenLabs' characters."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from shoal.speech import Word
from shoal.text.lexicon import UNSPACED

UNSPACED_WORD = re.compile(f"[{UNSPACED}]")


@dataclass(frozen=True, slots=True)
class WordScale:
    """Translates the words of a request to positions in the audio and the text of the client."""

    speed: float = 1.0  # speed of the output; the engine generates at speed 1
    seconds: float = 0.0  # duration of the audio before the request, at speed 1
    characters: int = 0  # client's text before the request's, in characters; negative: length of the request's prefix

    def apply(self, words: Iterable[Word]) -> tuple[Word, ...]:
        return tuple(
            Word(
                word.text,
                round((word.start + self.seconds) / self.speed, 3),
                round((word.end + self.seconds) / self.speed, 3),
                word.first + self.characters,
                word.last + self.characters,
            )
            for word in words
        )


def word_list(words: Iterable[Word]) -> list[dict[str, Any]]:
    """Return the words as JSON objects; `first` and `last` are character positions in the text."""
    return [asdict(word) for word in words]


def with_spaces(words: Sequence[Word]) -> Iterator[tuple[Word, str]]:
    """Yield each word with the space after it; characters of Chinese or Japanese that adjoin have none.

    The last word has one unless it is such a character: clients take the space as the end of a word.
    """
    for word, following in zip_longest(words, words[1:]):
        adjoins = bool(UNSPACED_WORD.match(word.text)) if following is None else following.first == word.last
        yield word, "" if adjoins else " "


class FishAlignment:
    """Alignment of consecutive messages, each with the words since the last; `chunk_seq` counts messages with words."""

    def __init__(self) -> None:
        self._number = -1

    def fields(self, words: Sequence[Word]) -> dict[str, Any]:
        """Return the fields of a message. Times count from `chunk_audio_offset_sec`, the start of its first word."""
        if not words:
            return {"content": "", "alignment": None, "chunk_seq": max(0, self._number), "chunk_audio_offset_sec": 0.0}
        self._number += 1
        begin = words[0].start
        segments = [
            {
                "text": word.text,
                "start": round(word.start - begin, 3),
                "end": round(word.end - begin, 3),
                # Extensions: character positions in the text.
                "first": word.first,
                "last": word.last,
            }
            for word in words
        ]
        alignment = {"segments": segments, "audio_duration": segments[-1]["end"]}
        content = "".join(word.text + space for word, space in with_spaces(words)).rstrip()
        return {"content": content, "alignment": alignment, "chunk_seq": self._number, "chunk_audio_offset_sec": begin}


@dataclass(frozen=True, slots=True)
class CharacterTimes:
    """Characters with their start and end in seconds. The times of a word are divided evenly over its characters."""

    characters: list[str]
    starts: list[float]
    ends: list[float]

    @classmethod
    def of(cls, words: Sequence[Word]) -> "CharacterTimes":
        """Return the characters of words. A space after a word takes no time: it completes the word."""
        times = cls([], [], [])
        for word, space in with_spaces(words):
            step = (word.end - word.start) / len(word.text)
            times.characters.extend((*word.text, *space))
            times.starts.extend(round(word.start + index * step, 3) for index in range(len(word.text)))
            times.ends.extend(round(word.start + (index + 1) * step, 3) for index in range(len(word.text)))
            times.starts.extend(word.end for _ in space)
            times.ends.extend(word.end for _ in space)
        return times

    def as_seconds(self) -> dict[str, Any]:
        """Return ElevenLabs' alignment of HTTP responses."""
        return {
            "characters": self.characters,
            "character_start_times_seconds": self.starts,
            "character_end_times_seconds": self.ends,
        }

    def as_milliseconds(self, names: tuple[str, str], begin: float) -> dict[str, Any]:
        """Return ElevenLabs' alignment of sockets, counted from `begin` seconds. `names` are those of its lists."""
        starts, durations = names
        spans = list(zip(self.starts, self.ends, strict=True))
        return {
            "chars": self.characters,
            starts: [round((start - begin) * 1000) for start, _ in spans],
            durations: [round((end - start) * 1000) for start, end in spans],
        }
