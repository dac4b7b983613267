"""Cut the audio of sentences that were spoken together, where it is quietest between their words."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shoal.book.word_times import TimedWord
from shoal.book.work import PlannedPiece
from shoal.speech import Samples

# Seconds that the end of a word and the start of the next one may be wrong.
UNCERTAIN_SECONDS = 0.1
# Length of the windows in which silence is searched: longer than the closure before the sound of a "t".
WINDOW_SECONDS = 0.08
SAME_SILENCE = 4.0  # power of windows that belong to the same silence, relative to the quietest
# Maximum power of a silence relative to the mean of the file (-25 dB). A louder cut is within speech, where a pause
# would sound like a break-off.
SILENT = 10 ** (-25 / 10)


class Cut(NamedTuple):
    """A place in the samples of a file: its ends, or between two sentences."""

    sample: int
    silent: bool  # False: speech continues across the cut


def part_cuts(samples: Samples, rate: int, piece: PlannedPiece, words: Sequence[TimedWord]) -> tuple[Cut, Cut]:
    """Return the start and end of a piece in its file; the whole file if no other sentence shares it."""
    begin, end = piece.part or (0, len(piece.text))
    return _cut(samples, rate, begin, piece, words), _cut(samples, rate, end, piece, words)


def words_of(words: Sequence[TimedWord], piece: PlannedPiece) -> list[TimedWord]:
    """Return the words of the part of a piece."""
    return [word for word in words if piece.part is None or piece.part[0] <= word.first < piece.part[1]]


def _cut(samples: Samples, rate: int, place: int, piece: PlannedPiece, words: Sequence[TimedWord]) -> Cut:
    """Return the cut in the audio that corresponds to a cut of its text at character `place`."""
    length = len(piece.text)
    if place in (0, length):
        return Cut(len(samples) if place else 0, silent=True)
    before, after = ([each for each in words if (each.first < place) is early] for early in (True, False))
    if before and after:
        first = max(before[-1].start, min(before[-1].end, after[0].start) - UNCERTAIN_SECONDS)
        last = min(after[0].end, max(before[-1].end, after[0].start) + UNCERTAIN_SECONDS)
    else:  # no word times: estimate the position from the share of characters
        middle = len(samples) / rate * place / length
        first, last = middle - 2 * UNCERTAIN_SECONDS, middle + 2 * UNCERTAIN_SECONDS
    return _quietest(samples, round(first * rate), round(last * rate), round(WINDOW_SECONDS * rate))


def _quietest(samples: Samples, first: int, last: int, window: int) -> Cut:
    """Return the middle of the quietest stretch between two samples, normally the pause between two sentences."""
    first, last = max(0, first), min(len(samples), last)
    total = np.concatenate(([0.0], np.cumsum(np.square(samples[first:last], dtype=np.float64))))
    if len(total) <= window:
        return Cut((first + last) // 2, silent=False)
    power = (total[window:] - total[:-window]) / window
    begin = int(power.argmin())
    louder = np.flatnonzero(power[begin:] > SAME_SILENCE * power[begin] + 1e-9)
    end = begin + (int(louder[0]) if louder.size else len(power) - begin) - 1
    silent = float(power[begin]) <= SILENT * float(np.square(samples, dtype=np.float64).mean())
    return Cut(first + (begin + end + window) // 2, silent)
