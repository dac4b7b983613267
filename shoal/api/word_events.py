"""Word times in the forms of the APIs: words, Fish's segments, ElevenLabs' characters."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.speech import Word


@dataclass(frozen=True, slots=True)
class WordScale:
    """Translates the words of a request to positions in the audio and the text of the client."""

    speed: float = 1.0  # speed of the output; the engine generates at speed 1
    seconds: float = 0.0  # duration of the audio before the request, at speed 1
    characters: int = 0  # length of the client's text before that of the request; negative: the request has a prefix

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


class FishAlignment:
    """Alignment of consecutive messages, each with the words that are new; `chunk_seq` counts those with words."""

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
        content = " ".join(word.text for word in words)
        return {"content": content, "alignment": alignment, "chunk_seq": self._number, "chunk_audio_offset_sec": begin}


@dataclass(frozen=True, slots=True)
class CharacterTimes:
    """Characters with their start and end in seconds. The times of a word are divided evenly over its characters."""

    characters: list[str]
    starts: list[float]
    ends: list[float]

    @classmethod
    def of(cls, words: Iterable[Word]) -> "CharacterTimes":
        """Return the characters of words, each followed by a space that takes no time: it completes the word."""
        times = cls([], [], [])
        for word in words:
            step = (word.end - word.start) / len(word.text)
            times.characters.extend((*word.text, " "))
            times.starts.extend(round(word.start + index * step, 3) for index in range(len(word.text)))
            times.ends.extend(round(word.start + (index + 1) * step, 3) for index in range(len(word.text)))
            times.starts.append(word.end)
            times.ends.append(word.end)
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
