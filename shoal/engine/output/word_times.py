"""Word times from attention: a monotonic path through the text of each turn, and the words on it."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from shoal.kernels.word_times.text_path_numpy import Origins
from shoal.speech import Word
from shoal.text.words import TextWord

Span = tuple[int, int]
# A word has ended when the path has been past it for this long. Before the first sound of a turn attention looks at all
# of its text, and a decision in those frames puts words up to a second too early.
CONFIRM_SECONDS = 0.2
# Frames after which a path copies its origins out of the arrays of the steps.
COPIED_FRAMES = 256


class MonotonicPath:
    """Most likely non-decreasing path through the tokens of a text, one token per frame (Viterbi)."""

    def __init__(self, tokens: int) -> None:
        self._count = tokens
        self._origins: list[Origins] = []  # per frame; the newest are views of arrays that all paths of a step share
        self._copied = 0  # frames whose origins have been copied
        self._path: list[int] = []

    def feed(self, origins: Origins) -> None:
        """Append a frame: origins [1 + tokens], the end of the best path, then the predecessor of each token."""
        self._origins.append(origins)
        if len(self._origins) - self._copied >= COPIED_FRAMES:
            self._copy()

    def tokens(self) -> list[int]:
        """Return the token of each frame, on the path that is most likely now; valid until the next frame."""
        if len(self._path) < len(self._origins):
            self._trace()
        return self._path

    def _trace(self) -> None:
        """Update the path from its end, as far back as it has changed."""
        path, origins, frame = self._path, self._origins, len(self._origins) - 1
        path += [-1] * (len(origins) - len(path))
        token = origins[frame].item(0)
        while frame >= 0 and path[frame] != token:
            path[frame] = token
            token = origins[frame].item(1 + token)
            frame -= 1

    def _copy(self) -> None:
        """Copy the newest origins: a view would keep the origins of all other texts of its step in memory."""
        new = [each[: 1 + self._count] for each in self._origins[self._copied :]]
        self._origins[self._copied :] = list(np.stack(new))
        self._copied = len(self._origins)


def frame_of(path: Sequence[int], token: int) -> float:
    """Return the frame, with a fraction, in which the path reaches a token.

    Tokens that the path skips divide the frame before it evenly.
    """
    frame = bisect_left(path, token)
    if frame == 0 or frame == len(path) or path[frame] == token:
        return float(frame)
    before, after = path[frame - 1], path[frame]
    return frame - (after - token) / (after - before)


@dataclass(frozen=True, slots=True)
class WordPlan:
    """Words of a request as they were written; `turns` has the index of the written word of each spoken one."""

    written: tuple[TextWord, ...]
    turns: list[list[int | None]]  # None: a word that the text does not have


@dataclass(slots=True)
class TurnTimes:
    """Path of one turn, and how far its words have been found."""

    path: MonotonicPath
    found: int = 0  # words that have ended
    frames: int = 0  # frames in which they were looked for
    ended: bool = False
    new: list[tuple[int, float, float]] = field(default_factory=list)  # written word, first and last frame


@dataclass(slots=True)
class WordTimes:
    """Word times of one utterance, while its frames are generated. Runs on the engine thread."""

    plan: WordPlan
    frame_seconds: float
    lead_frames: float = 0.0  # frames by which attention is ahead of the sound
    found: list[Word] = field(default_factory=list)  # words that have not been sent
    _turns: dict[int, TurnTimes] = field(default_factory=dict)
    _starts: dict[int, float] = field(default_factory=dict)  # seconds, by written word
    _last: float = 0.0  # seconds of the latest time
    _remaining: Counter[int] = field(init=False)  # spoken words of each written word that have not been found

    def __post_init__(self) -> None:
        self._remaining = self._count()

    def feed(self, turn: int, origins: Origins, tokens: int) -> None:
        """Append a frame of a turn, whose text has this many tokens, with the origins of its path."""
        times = self._turns.get(turn)
        if times is None:
            times = self._turns[turn] = TurnTimes(MonotonicPath(tokens))
        times.path.feed(origins)

    def restart_turn(self, turn: int) -> None:
        """Drop the frames of a turn, none of whose audio was sent."""
        self._turns.pop(turn, None)

    def divide_turn(self, turn: int, words: int) -> None:
        """Make the words of a turn after the first `words` a turn of their own."""
        owners = self.plan.turns[turn]
        self.plan.turns[turn : turn + 1] = [owners[:words], owners[words:]]

    def restart(self) -> None:
        """Drop everything: the utterance is generated again."""
        self._turns.clear()
        self._starts.clear()
        self.found.clear()
        self._remaining, self._last = self._count(), 0.0

    def find(self, turn: int, tokens: Sequence[Span], *, ended: bool) -> TurnTimes | None:
        """Find the words of a turn that have ended. `tokens` are the tokens [first, last) of each.

        With `ended` the turn has no more frames, and all its words are found. None for a turn without frames.
        """
        times = self._turns.get(turn)
        if times is None:
            return None
        path = times.path.tokens()
        if times.frames == len(path) and times.ended == ended:
            return times
        times.frames, times.ended = len(path), ended
        confirmed = len(path) if ended else len(path) - max(1, int(CONFIRM_SECONDS / self.frame_seconds + 1e-9))
        for (first, last), written in islice(zip(tokens, self.plan.turns[turn], strict=False), times.found, None):
            end = frame_of(path, last)
            if end > confirmed:
                break
            times.found += 1
            if written is not None:
                times.new.append((written, frame_of(path, first), end))
        return times

    def collect(self, turn: int, tokens: Sequence[Span], begin: float, rate: float, *, ended: bool) -> None:
        """Give times to the words of a turn that have ended, as `find` does.

        The audio of the turn begins at `begin` seconds and is `rate` times as fast as it was generated.
        """
        times = self.find(turn, tokens, ended=ended)
        if times is None:
            return
        for written, start, end in times.new:
            first, last = self._seconds(start, times.frames), self._seconds(end, times.frames)
            self._add_spoken_word(written, begin + first / rate, begin + last / rate)
        times.new.clear()
        if ended:
            del self._turns[turn]

    def take(self) -> tuple[Word, ...]:
        """Return the words found since the last call."""
        words = tuple(self.found)
        self.found.clear()
        return words

    def _count(self) -> "Counter[int]":
        return Counter(word for turn in self.plan.turns for word in turn if word is not None)

    def _seconds(self, frame: float, frames: int) -> float:
        # No lead at the start: there is no earlier sound that attention could be ahead of.
        return max(0.0, min(frame + self.lead_frames, frames)) * self.frame_seconds if frame > 0 else 0.0

    def _add_spoken_word(self, index: int, start: float, end: float) -> None:
        """Record the times of a spoken word; its written word is found with the last one. Times never decrease."""
        start = max(start, self._last)
        self._last = end = max(start, end)
        begun = self._starts.setdefault(index, start)
        self._remaining[index] -= 1
        if not self._remaining[index]:
            word = self.plan.written[index]
            self.found.append(Word(word.text, round(begun, 3), round(end, 3), word.first, word.last))
