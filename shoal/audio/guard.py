"""Cheap checks that generated samples are speech, for whole utterances or streams.

A model that fails generates silence, noise at full scale, an endless vowel or nothing. The bounds are generous: a
defect means that generation failed, not that the speech is slow.
"""

import math
import re
import unicodedata
from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np

from shoal.audio.pcm import Samples


class SpeechDefect(Enum):
    """Reason why samples are not speech."""

    NOT_FINITE = "not finite"
    CLIPPED = "clipped"
    SILENT = "silent"
    TOO_SHORT = "too short"
    RUNAWAY = "runaway"


@dataclass(frozen=True, slots=True)
class GuardThresholds:
    """Thresholds of the defects. The rates are those of ordinary reading; fraction and factor widen the bounds."""

    full_scale: float = 0.999
    max_clipped_fraction: float = 0.01
    silence_rms: float = 1e-3
    letters_per_second: float = 15.0
    # Ideographs, kana and hangul: about one syllable each.
    wide_letters_per_second: float = 4.5
    digits_per_second: float = 4.0
    min_reading_fraction: float = 0.25
    # Minimum duration of speech that max_frames truncated.
    min_truncated_seconds: float = 0.1
    max_reading_factor: float = 3.0
    # Breath and pauses, independent of the text; without it a single word would count as a runaway.
    slack_seconds: float = 4.0


DEFAULT_THRESHOLDS = GuardThresholds()
# Style markers and speaker tags may be silent or a long laugh: they raise the maximum duration only.
MARKER = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|<\|[^|]*\|>")
MARKER_SECONDS = 3.0
MAX_STORED_CHARACTERS = 8192  # cached reading times; Unicode has a hundred times as many characters
EDGE_SECONDS = 0.25  # attack and release of a turn, independent of its length


@dataclass(frozen=True, slots=True)
class DurationBounds:
    """Plausible duration of the speech of a text."""

    min_seconds: float
    max_seconds: float


def reading_seconds(text: str, thresholds: GuardThresholds = DEFAULT_THRESHOLDS) -> float:
    """Return the time to read the letters and digits of a text at an ordinary rate, without pauses."""
    return sum(map(_seconds_by_character(thresholds).__getitem__, text))


def duration_bounds(text: str, thresholds: GuardThresholds = DEFAULT_THRESHOLDS) -> DurationBounds:
    """Return the duration bounds of a text; markers and speaker tags only raise the maximum."""
    minimum = reading_seconds(MARKER.sub(" ", text), thresholds) * thresholds.min_reading_fraction
    # Brackets can also contain words that are spoken, so the maximum counts their letters too.
    maximum = reading_seconds(text, thresholds) * thresholds.max_reading_factor
    markers = len(MARKER.findall(text)) * MARKER_SECONDS
    return DurationBounds(minimum, maximum + markers + thresholds.slack_seconds)


def shortest_seconds(text: str, fraction: float, pace: float = 1.0) -> float:
    """Return the shortest plausible duration of one turn: `fraction` of the time to read it, 0 without a word.

    `pace` is the reading time of the voice relative to the ordinary rate.
    """
    reading = reading_seconds(MARKER.sub(" ", text))
    return fraction * (reading * pace + EDGE_SECONDS) if reading else 0.0


class SpeechGuard:
    """Checks one utterance. `feed` reports fatal defects immediately; `finish` reports all.

    Without a text the duration is not checked.
    """

    def __init__(
        self, sample_rate: int, text: str | None = None, thresholds: GuardThresholds = DEFAULT_THRESHOLDS
    ) -> None:
        self._sample_rate = sample_rate
        self._thresholds = thresholds
        self._bounds = None if text is None else duration_bounds(text, thresholds)
        self._samples = 0
        self._at_full_scale = 0
        self._energy = 0.0
        self._finite = True

    @property
    def seconds(self) -> float:
        return self._samples / self._sample_rate

    def feed(self, samples: Samples) -> SpeechDefect | None:
        """Return NOT_FINITE or RUNAWAY as soon as it occurs and on every later call; generation can stop then."""
        self._samples += samples.size
        # Runs on the engine thread between two steps, so it must be fast: a non-finite sample makes the energy
        # non-finite, and the exact count is needed only if some sample is at full scale, which is rare.
        energy = float(np.dot(samples, samples))
        self._finite = self._finite and math.isfinite(energy)
        if self._finite and samples.size:
            self._energy += energy
            limit = self._thresholds.full_scale
            if samples.max() >= limit or samples.min() <= -limit:
                self._at_full_scale += int(np.count_nonzero(np.abs(samples) >= limit))
        return self._fatal_defect()

    def finish(self, *, cut: bool = False) -> tuple[SpeechDefect, ...]:
        """Return all defects, worst first; empty for speech. With `cut`, speech was truncated and may be short."""
        fatal = self._fatal_defect()
        if fatal is SpeechDefect.NOT_FINITE:
            return (fatal,)
        found = [fatal] if fatal else []
        if self._bounds is not None and self.seconds < self._min_seconds(self._bounds, cut=cut):
            found.append(SpeechDefect.TOO_SHORT)
        if self._energy <= self._thresholds.silence_rms**2 * self._samples:
            found.append(SpeechDefect.SILENT)
        if self._at_full_scale > self._thresholds.max_clipped_fraction * self._samples:
            found.append(SpeechDefect.CLIPPED)
        return tuple(found)

    def _min_seconds(self, bounds: DurationBounds, *, cut: bool) -> float:
        return min(bounds.min_seconds, self._thresholds.min_truncated_seconds) if cut else bounds.min_seconds

    def _fatal_defect(self) -> SpeechDefect | None:
        if not self._finite:
            return SpeechDefect.NOT_FINITE
        if self._bounds is not None and self.seconds > self._bounds.max_seconds:
            return SpeechDefect.RUNAWAY
        return None


def check_speech(
    samples: Samples, sample_rate: int, text: str | None = None, thresholds: GuardThresholds = DEFAULT_THRESHOLDS
) -> tuple[SpeechDefect, ...]:
    """Return the defects of a whole utterance; empty for speech."""
    guard = SpeechGuard(sample_rate, text, thresholds)
    guard.feed(samples)
    return guard.finish()


class _SecondsByCharacter(dict[str, float]):
    """Reading time of each character, computed at its first use."""

    def __init__(self, thresholds: GuardThresholds) -> None:
        self._thresholds = thresholds

    def __missing__(self, character: str) -> float:
        seconds = _character_seconds(character, self._thresholds)
        if len(self) < MAX_STORED_CHARACTERS:
            self[character] = seconds
        return seconds


@cache
def _seconds_by_character(thresholds: GuardThresholds) -> _SecondsByCharacter:
    return _SecondsByCharacter(thresholds)


def _character_seconds(character: str, thresholds: GuardThresholds) -> float:
    category = unicodedata.category(character)[0]
    if category == "N":
        return 1.0 / thresholds.digits_per_second
    # Combining marks are the vowels of many scripts.
    if category not in "LM":
        return 0.0
    wide = unicodedata.east_asian_width(character) in "WF"
    return 1.0 / (thresholds.wide_letters_per_second if wide else thresholds.letters_per_second)
