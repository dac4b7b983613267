"""Scores of clips: verdicts compared with text, voice and expected duration."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.evaluate.manifest import Clip
from training.evaluate.verdicts import Verdict
from training.judges import ErrorCount, Samples, character_errors, cosine_similarity, word_errors

RUNAWAY = 3.0


@dataclass(frozen=True, slots=True)
class Score:
    """Comparison of one clip with its text, its voice and the reference system."""

    clip: Clip
    verdict: Verdict
    words: ErrorCount
    characters: ErrorCount
    similarity: float | None
    nearest: str | None
    expected_seconds: float | None
    faults: list[str]


class Centroids:
    """Mean embedding per voice of the reference system, without the sentence that is judged.

    So a clip is compared with its voice, not with itself or with the same words.
    """

    def __init__(self, spoken: Sequence[tuple[Clip, Verdict]]) -> None:
        self._by_voice: dict[str, dict[str, Samples]] = defaultdict(dict)
        for clip, verdict in spoken:
            if verdict.embedding is not None:
                self._by_voice[clip.voice][clip.text] = np.array(verdict.embedding, dtype=np.float32)

    def similarity(self, text: str, embedding: list[float] | None) -> dict[str, float]:
        if embedding is None:
            return {}
        own, found = np.array(embedding, dtype=np.float32), {}
        for voice, sentences in self._by_voice.items():
            others = [vector for sentence, vector in sentences.items() if sentence != text]
            if others:
                found[voice] = cosine_similarity(own, np.mean(others, axis=0))
        return found


class Durations:
    """Expected duration: that of the same sentence in the reference system, else from the pace of voice or system."""

    def __init__(self, spoken: Sequence[tuple[Clip, Verdict]]) -> None:
        sound = [(clip, verdict.seconds) for clip, verdict in spoken if verdict.embedding is not None]
        self._pairs = {clip.pair: seconds for clip, seconds in sound}
        self._pace: dict[str, list[float]] = defaultdict(list)
        for clip, seconds in sound:
            self._pace[clip.voice].append(seconds / len(clip.text))

    def expected(self, clip: Clip) -> float | None:
        if clip.pair in self._pairs:
            return self._pairs[clip.pair]
        paces = self._pace.get(clip.voice) or [pace for paces in self._pace.values() for pace in paces]
        return float(np.median(paces)) * len(clip.text) if paces else None


def score_clips(judged: Sequence[tuple[Clip, Verdict]], reference: str) -> list[Score]:
    spoken = [(clip, verdict) for clip, verdict in judged if clip.system == reference]
    voices, durations = Centroids(spoken), Durations(spoken)
    return [_score(clip, verdict, voices, durations) for clip, verdict in judged]


def _score(clip: Clip, verdict: Verdict, voices: Centroids, durations: Durations) -> Score:
    similarity = voices.similarity(clip.text, verdict.embedding)
    expected = durations.expected(clip)
    runaway = expected is not None and verdict.seconds > RUNAWAY * expected
    return Score(
        clip=clip,
        verdict=verdict,
        words=word_errors(clip.text, verdict.heard),
        characters=character_errors(clip.text, verdict.heard),
        similarity=similarity.get(clip.voice),
        nearest=max(similarity, key=lambda voice: similarity[voice]) if clip.voice in similarity else None,
        expected_seconds=expected,
        faults=[*verdict.faults, "runaway"] if runaway else verdict.faults,
    )
