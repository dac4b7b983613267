"""Metrics over many clips. Each is a ratio of sums, so that pooling and resampling use the same code."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from training.evaluate.scores import Score


def _mean_of(value: float | None) -> tuple[float, float]:
    return (0.0, 0.0) if value is None else (value, 1.0)


METRICS: dict[str, Callable[[Score], tuple[float, float]]] = {
    "wer": lambda score: (100.0 * score.words.edits, score.words.length),
    "cer": lambda score: (100.0 * score.characters.edits, score.characters.length),
    "mos": lambda score: _mean_of(score.verdict.mos),
    "similarity": lambda score: _mean_of(score.similarity),
    "nearest": lambda score: _mean_of(None if score.nearest is None else 100.0 * (score.nearest == score.clip.voice)),
    "seconds": lambda score: _mean_of(score.verdict.seconds),
    "length": lambda score: (score.verdict.seconds, score.expected_seconds) if score.expected_seconds else (0.0, 0.0),
    "faults": lambda score: (100.0 * bool(score.faults), 1.0),
}


def measure(metric: str, scores: Iterable[Score]) -> float | None:
    parts = [METRICS[metric](score) for score in scores]
    below = sum(part[1] for part in parts)
    return sum(part[0] for part in parts) / below if below else None


@dataclass(frozen=True, slots=True)
class Summary:
    system: str
    voice: str
    clips: int
    metrics: dict[str, float | None]
    faults: dict[str, int]


def summarise(scores: Sequence[Score]) -> list[Summary]:
    """Return the metrics per system: for each voice, then for all voices together as "all"."""
    found = []
    for system in dict.fromkeys(score.clip.system for score in scores):
        own = [score for score in scores if score.clip.system == system]
        for voice in dict.fromkeys(score.clip.voice for score in own):
            found.append(_summary(system, voice, [score for score in own if score.clip.voice == voice]))
        found.append(_summary(system, "all", own))
    return found


def _summary(system: str, voice: str, scores: Sequence[Score]) -> Summary:
    faults: dict[str, int] = defaultdict(int)
    for score in scores:
        for fault in score.faults:
            faults[fault] += 1
    return Summary(system, voice, len(scores), {metric: measure(metric, scores) for metric in METRICS}, dict(faults))
