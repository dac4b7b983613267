"""Is what came out speech? Cheap checks over samples, whole or while they stream.

A model that lost its way gives silence, noise at full scale, an endless vowel or nothing at all. None of these needs
ears to be noticed. The bounds are generous: a finding means that something broke, not that a reading was slow.
"""

import math
import re
import unicodedata
from dataclasses import dataclass
from enum import Enum

import numpy as np

from shoal.audio.pcm import Samples


class SpeechDefect(Enum):
    """Something no listener would call speech."""

    NOT_FINITE = "not finite"
    CLIPPED = "clipped"
    SILENT = "silent"
    TOO_SHORT = "too short"
    RUNAWAY = "runaway"


@dataclass(frozen=True, slots=True)
class GuardThresholds:
    """Where a finding begins. Rates are of ordinary reading; the factors around them make the bounds generous."""

    full_scale: float = 0.999
    max_clipped_fraction: float = 0.01
    silence_rms: float = 1e-3
    letters_per_second: float = 15.0
    # Ideographs, kana and hangul: a syllable or so each.
    wide_letters_per_second: float = 4.5
    digits_per_second: float = 4.0
    min_reading_fraction: float = 0.25
    # Of a speech that was cut where the caller wanted it.
    min_truncated_seconds: float = 0.1
    max_reading_factor: float = 3.0
    # Breath, pauses and a lead-in, whatever the text; without it one word would be a runaway at once.
    slack_seconds: float = 4.0


DEFAULT_THRESHOLDS = GuardThresholds()
# Style markers and speaker tags may be silent or a long laugh: they never demand time, they always allow it.
MARKER = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|<\|[^|]*\|>")
MARKER_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class DurationBounds:
    """How long a text may take to say, in seconds."""

    min_seconds: float
    max_seconds: float


def reading_seconds(text: str, thresholds: GuardThresholds = DEFAULT_THRESHOLDS) -> float:
    """The time an ordinary reader takes for the letters and digits of a text; pauses are not counted."""
    return sum(_character_seconds(character, thresholds) for character in text)


def duration_bounds(text: str, thresholds: GuardThresholds = DEFAULT_THRESHOLDS) -> DurationBounds:
    """Bounds for the speech of a text, markers and speaker tags set apart."""
    shortest = reading_seconds(MARKER.sub(" ", text), thresholds) * thresholds.min_reading_fraction
    # Brackets can also hold words that are read aloud, so the upper bound counts their letters too.
    longest = reading_seconds(text, thresholds) * thresholds.max_reading_factor
    markers = len(MARKER.findall(text)) * MARKER_SECONDS
    return DurationBounds(shortest, longest + markers + thresholds.slack_seconds)


class SpeechGuard:
    """Watches one utterance. `feed` tells at once what cannot get better; `finish` tells the rest.

    Without a text the length is not judged.
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
        """NOT_FINITE or RUNAWAY as soon as it is so, and on every call after; the engine may stop there."""
        self._samples += samples.size
        # What is not finite makes the energy so; ordinary speech never comes near full scale. This is the engine's
        # time, between two frames of everybody.
        energy = float(np.dot(samples, samples))
        self._finite = self._finite and math.isfinite(energy)
        if self._finite and samples.size:
            self._energy += energy
            most = self._thresholds.full_scale
            if samples.max() >= most or samples.min() <= -most:
                self._at_full_scale += int(np.count_nonzero(np.abs(samples) >= most))
        return self._hopeless()

    def finish(self, *, cut: bool = False) -> tuple[SpeechDefect, ...]:
        """Everything found in the utterance, the gravest first; empty for speech. One that was `cut` may be short."""
        hopeless = self._hopeless()
        if hopeless is SpeechDefect.NOT_FINITE:
            return (hopeless,)
        found = [hopeless] if hopeless else []
        if self._bounds is not None and self.seconds < self._shortest(self._bounds, cut=cut):
            found.append(SpeechDefect.TOO_SHORT)
        if self._energy <= self._thresholds.silence_rms**2 * self._samples:
            found.append(SpeechDefect.SILENT)
        if self._at_full_scale > self._thresholds.max_clipped_fraction * self._samples:
            found.append(SpeechDefect.CLIPPED)
        return tuple(found)

    def _shortest(self, bounds: DurationBounds, *, cut: bool) -> float:
        return min(bounds.min_seconds, self._thresholds.min_truncated_seconds) if cut else bounds.min_seconds

    def _hopeless(self) -> SpeechDefect | None:
        if not self._finite:
            return SpeechDefect.NOT_FINITE
        if self._bounds is not None and self.seconds > self._bounds.max_seconds:
            return SpeechDefect.RUNAWAY
        return None


def check_speech(
    samples: Samples, sample_rate: int, text: str | None = None, thresholds: GuardThresholds = DEFAULT_THRESHOLDS
) -> tuple[SpeechDefect, ...]:
    """What is wrong with a whole utterance; empty for speech."""
    guard = SpeechGuard(sample_rate, text, thresholds)
    guard.feed(samples)
    return guard.finish()


def _character_seconds(character: str, thresholds: GuardThresholds) -> float:
    kind = unicodedata.category(character)[0]
    if kind == "N":
        return 1.0 / thresholds.digits_per_second
    # Marks are the vowels of many scripts.
    if kind not in "LM":
        return 0.0
    wide = unicodedata.east_asian_width(character) in "WF"
    return 1.0 / (thresholds.wide_letters_per_second if wide else thresholds.letters_per_second)
