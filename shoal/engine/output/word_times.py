"""Word times from attention weights: a monotonic path through the text of each turn, and the words on it."""

from bisect import bisect_left
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

    Frames are only stored when they arrive; `extend_paths` computes the scores of the new ones. Origins are not stored,
    only whether a token was reached from an earlier one: they follow from the scores of the frame before, and only
    those of the path are needed.
    """

    def __init__(self, tokens: int) -> None:
        self.count, self._slope = tokens, _slope(tokens)
        self.new: list[NDArray[np.float32]] = []  # frames without scores: attention weights [heads, tokens]
        self.scores: list[NDArray[np.float64]] = []  # per frame, the score of the best path that ends in each token
        self._moves: list[NDArray[np.bool_]] = []  # per frame, the tokens that this path reaches from an earlier one
        self._path: list[int] = []

    def feed(self, weights: NDArray[np.float32]) -> None:
        """Append a frame with its attention weights [heads, tokens]."""
        self.new.append(weights)

    def append(self, scores: NDArray[np.float64], moves: NDArray[np.bool_]) -> None:
        """Append the scores [frames, tokens] of the new frames, with which of the tokens are reached from earlier ones.

        Copies them: the arguments are parts of arrays over many paths.
        """
        self.scores.extend(scores.copy())
        self._moves.extend(moves.copy())
        self.new.clear()

    def tokens(self) -> list[int]:
        """Return the token of each frame, on the path that is most likely now; valid until the next frame."""
        extend_paths([self])
        if len(self._path) < len(self.scores):
            self._trace()
        return self._path

    def _trace(self) -> None:
        """Update the path from its end, as far back as it has changed."""
        old, frame = self._path, len(self.scores) - 1
        path = [*old, *([-1] * (len(self.scores) - len(old)))]
        token = int(self.scores[-1].argmax())
        while frame >= 0 and path[frame] != token:
            path[frame] = token
            if frame and self._moves[frame][token]:
                token = int((self.scores[frame - 1][:token] + self._slope[:token]).argmax())
            frame -= 1
        self._path = path


def extend_paths(paths: Sequence[MonotonicPath]) -> None:
    """Compute the scores of the new frames of several paths in array operations over all of them.

    The scores of a path do not depend on the others: shorter texts are padded after their last token, and a token is
    reached only from earlier ones.
    """
    paths = [path for path in paths if path.new]
    if not paths:
        return
    emissions = _emissions(paths)  # [frames, paths, tokens]
    slope, before = _slope(emissions.shape[2]), np.zeros(emissions.shape[1:])
    for row, path in enumerate(paths):
        if path.scores:
            before[row, : path.count] = path.scores[-1]
    scores, moves = np.empty(emissions.shape), np.zeros(emissions.shape, np.bool_)
    for number, emission in enumerate(emissions):
        arrivals = _arrivals(before, slope, moves[number])
        if not number:
            # A path starts at the first token; a later start leaves out those before it.
            arrivals[[not path.scores for path in paths]] = -slope
        before = np.add(arrivals, emission, out=scores[number])
    for row, path in enumerate(paths):
        frames = len(path.new)
        path.append(scores[:frames, row, : path.count], moves[:frames, row, : path.count])


def _slope(tokens: int) -> NDArray[np.float64]:
    return SKIP_PENALTY * np.arange(tokens, dtype=np.float64)


def _emissions(paths: Sequence[MonotonicPath]) -> NDArray[np.float64]:
    """Return the logarithms of the weights [frames, paths, tokens] of the new frames, means over all heads."""
    frames, heads = max(len(path.new) for path in paths), len(paths[0].new[0])
    weights = np.zeros((frames, len(paths), heads, max(path.count for path in paths)), np.float32)
    for row, path in enumerate(paths):
        for frame, each in enumerate(path.new):
            weights[frame, row, :, : path.count] = each
    found: NDArray[np.float64] = np.log(weights.mean(2, dtype=np.float64) + FLOOR)
    return found


def _arrivals(before: NDArray[np.float64], slope: NDArray[np.float64], moves: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the best score [paths, tokens] with which each token is reached; set `moves` where from an earlier token.

    The penalty is linear in the distance, so the best move from any earlier token is a running maximum.
    """
    moved = np.maximum.accumulate(before + slope, axis=1)[:, :-1] - slope[:-1]
    arrivals = before.copy()
    np.greater(moved, before[:, 1:], out=moves[:, 1:])
    np.maximum(before[:, 1:], moved, out=arrivals[:, 1:])
    return arrivals


def frame_of(path: Sequence[int], token: int) -> float:
    """Return the frame in which the path reaches a token; tokens that it leaves out share the last frame before."""
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
        owned = zip(tokens[times.done :], self.plan.turns[turn][times.done :], strict=False)
        for (first, last), written in owned:
            start, end = frame_of(path, first), frame_of(path, last)
            if end > confirmed and not ended:
                break
            times.done += 1
            if written is not None:
                self._found(written, *(begin + self._seconds(frame, len(path)) / rate for frame in (start, end)))
        if ended:
            del self._turns[turn]

    def path(self, turn: int) -> MonotonicPath | None:
        """Return the path of a turn, or None if it has no frames."""
        times = self._turns.get(turn)
        return None if times is None else times.path

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
