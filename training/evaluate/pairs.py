"""Paired comparison of two systems, with a confidence interval of the difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from training.evaluate.metrics import METRICS, measure
from training.evaluate.scores import Score

COMPARED = ("wer", "cer", "mos", "similarity")


@dataclass(frozen=True, slots=True)
class Comparison:
    """`after` against `before` on the sentences both spoke; the difference with its 95 % interval."""

    metric: str
    before: str
    after: str
    sentences: int
    before_value: float
    after_value: float
    difference: float
    low: float | None
    high: float | None


def paired(scores: Sequence[Score], before: str, after: str) -> tuple[list[Score], list[Score]]:
    """Return the scores of two systems on the voices and sentences that both have."""
    first = [score for score in scores if score.clip.system == before]
    second = [score for score in scores if score.clip.system == after]
    shared = {score.clip.pair for score in first} & {score.clip.pair for score in second}
    return [s for s in first if s.clip.pair in shared], [s for s in second if s.clip.pair in shared]


def compare(scores: Sequence[Score]) -> list[Comparison]:
    systems = list(dict.fromkeys(score.clip.system for score in scores))
    found = [_comparison(m, b, a, *paired(scores, b, a)) for b, a in combinations(systems, 2) for m in COMPARED]
    return [comparison for comparison in found if comparison is not None]


def _comparison(metric: str, before: str, after: str, old: list[Score], new: list[Score]) -> Comparison | None:
    old_value, new_value = measure(metric, old), measure(metric, new)
    if old_value is None or new_value is None:
        return None
    texts = list(dict.fromkeys(score.clip.text for score in old))
    interval = bootstrap(_sums(metric, old, texts), _sums(metric, new, texts))
    return Comparison(metric, before, after, len(texts), old_value, new_value, new_value - old_value, *interval)


def _sums(metric: str, scores: Sequence[Score], texts: Sequence[str]) -> NDArray[np.float64]:
    """Return [sentences, 2]: the two sums of the metric over all voices of each sentence."""
    row = {text: n for n, text in enumerate(texts)}
    sums = np.zeros((len(texts), 2))
    for score in scores:
        sums[row[score.clip.text]] += METRICS[metric](score)
    return sums


def bootstrap(
    before: NDArray[np.float64], after: NDArray[np.float64], rounds: int = 2000, seed: int = 0
) -> tuple[float | None, float | None]:
    """Return the 95 % bootstrap interval of the difference of two ratios of sums [sentences, 2].

    Whole sentences are resampled, with all voices and both systems: a hard sentence is hard for every voice, so clips
    of it are not independent.
    """
    count = len(before)
    if count < 2:
        return None, None
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=rounds).astype(np.float64)
    old, new = draws @ before, draws @ after
    usable = (old[:, 1] > 0) & (new[:, 1] > 0)
    differences = new[usable, 0] / new[usable, 1] - old[usable, 0] / old[usable, 1]
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)
