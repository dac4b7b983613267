"""Word times from attention weights: a monotonic path through the text of each turn, and the words on it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.speech import Word
from shoal.text.words import TextWord

Span = tuple[int, int]
# Penalty, in nats, of each token that the path leaves out: rapid speech passes more than one token per frame.
SKIP_PENALTY = 0.4
# A word has ended when the path has been past it for this long. Before the first sound of a turn attention looks at all
# of its text, and a decision in those frames puts words up to a second too early.
CONFIRM_SECONDS = 0.2
# Attention is never taken as impossible: a frame that attends elsewhere must not break the path.
FLOOR = 1e-4


class MonotonicPath:
    """Most likely non-decreasing path through the tokens of a text, one token per frame (Viterbi).

    Frames are only stored when they arrive; `tokens` computes the scores of the new ones. Origins are not stored: they
    follow from the scores of the frame before, and only those of the path are needed.
    """

    def __init__(self, tokens: int) -> None:
        self._slope = SKIP_PENALTY * np.arange(tokens, dtype=np.float64)
        self._new: list[NDArray[np.float32]] = []
        self._scores: list[NDArray[np.float64]] = []  # per frame, the score of the best path that ends in each token
        self._path: list[int] = []

    def feed(self, weights: NDArray[np.float32]) -> None:
        """Append a frame with its attention weights [heads, tokens]."""
        self._new.append(weights)

    def tokens(self) -> NDArray[np.int64]:
        """Return the token of each frame, on the path that is most likely now."""
        if self._new:
            self._extend(np.log(np.stack(self._new).mean(1, dtype=np.float64) + FLOOR))
            self._new.clear()
            self._trace()
        return np.array(self._path, np.int64)

    def _extend(self, emissions: NDArray[np.float64]) -> None:
        """Compute the scores of further frames with emissions [frames, tokens]."""
        for emission in emissions:
            # The path starts at the first token; a later start leaves out the tokens before it.
            score = self._arrivals(self._scores[-1]) if self._scores else -self._slope
            self._scores.append(score + emission)

    def _arrivals(self, before: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the best score with which each token is reached from the frame before.

        The penalty is linear in the distance, so the best move from any earlier token is a running maximum.
        """
        moved = np.maximum.accumulate(before + self._slope)[:-1] - self._slope[:-1]
        arrivals = before.copy()
        np.maximum(before[1:], moved, out=arrivals[1:])
        return arrivals

    def _trace(self) -> None:
        """Update the path from its end, as far back as it has changed."""
        old, frame = self._path, len(self._scores) - 1
        path = [*old, *([-1] * (len(self._scores) - len(old)))]
        token = int(self._scores[-1].argmax())
        while frame >= 0 and path[frame] != token:
            path[frame] = token
            frame -= 1
            if frame >= 0:
                token = self._origin(frame, token)
        self._path = path

    def _origin(self, frame: int, token: int) -> int:
        """Return the token of `frame` from which the best path reaches `token` in the next one."""
        if token == 0:
            return 0
        reachable = self._scores[frame][:token] + self._slope[:token]
        best = int(reachable.argmax())
        moves = reachable[best] - self._slope[token - 1] > self._scores[frame][token]
        return best if moves else token


def frame_of(path: NDArray[np.int64], token: int) -> float:
    """Return the frame in which the path reaches a token; tokens that it leaves out share the last frame before."""
    frame = int(path.searchsorted(token))
    if frame == 0 or frame == len(path) or path[frame] == token:
        return float(frame)
    before, after = path[frame - 1], path[frame]
    return frame - float(after - token) / float(after - before)


@dataclass(frozen=True, slots=True)
class WordPlan:
    """Words of a request as they were written; `turns` has the index of the written word of each spoken one."""

    written: tuple[TextWord, ...]
    turns: list[list[int | None]]  # None: a word that the text does not have


@dataclass(slots=True)
class TurnTimes:
    """Path of one turn; the first `done` of its words have been found."""

    path: MonotonicPath
    done: int = 0


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

    def feed(self, turn: int, weights: NDArray[np.float32]) -> None:
        """Append a frame of a turn with its attention weights [heads, tokens]."""
        if turn not in self._turns:
            self._turns[turn] = TurnTimes(MonotonicPath(weights.shape[1]))
        self._turns[turn].path.feed(weights)

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

    def collect(self, turn: int, tokens: Sequence[Span], begin: float, rate: float, *, ended: bool) -> None:
        """Find the words of a turn that have ended. `tokens` are the tokens [first, last) of each.

        The audio of the turn begins at `begin` seconds and is `rate` times as fast as it was generated. With `ended`
        it has no more frames, and all its words are found.
        """
        times = self._turns.get(turn)
        if times is None:
            return
        path = times.path.tokens()
        confirmed = len(path) - max(1, int(CONFIRM_SECONDS / self.frame_seconds + 1e-9))
        owned = list(zip(tokens, self.plan.turns[turn], strict=False))
        for (first, last), written in owned[times.done :]:
            start, end = frame_of(path, first), frame_of(path, last)
            if end > confirmed and not ended:
                break
            times.done += 1
            if written is not None:
                self._found(written, *(begin + self._seconds(frame, len(path)) / rate for frame in (start, end)))
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
        # The first sound is not late: there is nothing before it that attention could be ahead of.
        return max(0.0, min(frame + self.lead_frames, frames)) * self.frame_seconds if frame > 0 else 0.0

    def _found(self, index: int, start: float, end: float) -> None:
        """Add a written word when the last of its spoken words has ended. Times never decrease."""
        start = max(start, self._last)
        self._last = end = max(start, end)
        begun = self._starts.setdefault(index, start)
        self._remaining[index] -= 1
        if not self._remaining[index]:
            word = self.plan.written[index]
            self.found.append(Word(word.text, round(begun, 3), round(end, 3), word.first, word.last))
