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


class Finding(Enum):
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
    clipped_share: float = 0.01
    silence_rms: float = 1e-3
    letters_per_second: float = 15.0
    # Ideographs, kana and hangul: a syllable or so each.
    wide_letters_per_second: float = 4.5
    digits_per_second: float = 4.0
    shortest_share: float = 0.25
    # Of a speech that was cut where the caller wanted it.
    shortest_cut_seconds: float = 0.1
    longest_factor: float = 3.0
    # Breath, pauses and a lead-in, whatever the text; without it one word would be a runaway at once.
    longest_slack_seconds: float = 4.0


USUAL_THRESHOLDS = GuardThresholds()
# Style markers and speaker tags may be silent or a long laugh: they never demand time, they always allow it.
MARKER = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|<\|[^|]*\|>")
MARKER_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class SpeechSpan:
    """How long a text may take to say, in seconds."""

    shortest: float
    longest: float


def reading_seconds(text: str, thresholds: GuardThresholds = USUAL_THRESHOLDS) -> float:
    """The time an ordinary reader takes for the letters and digits of a text; pauses are not counted."""
    return sum(_character_seconds(character, thresholds) for character in text)


def speech_span(text: str, thresholds: GuardThresholds = USUAL_THRESHOLDS) -> SpeechSpan:
    """Bounds for the speech of a text, markers and speaker tags set apart."""
    shortest = reading_seconds(MARKER.sub(" ", text), thresholds) * thresholds.shortest_share
    # Brackets can also hold words that are read aloud, so the upper bound counts their letters too.
    longest = reading_seconds(text, thresholds) * thresholds.longest_factor
    markers = len(MARKER.findall(text)) * MARKER_SECONDS
    return SpeechSpan(shortest, longest + markers + thresholds.longest_slack_seconds)


class SpeechGuard:
    """Watches one utterance. `feed` tells at once what cannot get better; `finish` tells the rest.

    Without a text the length is not judged.
    """

    def __init__(
        self, sample_rate: int, text: str | None = None, thresholds: GuardThresholds = USUAL_THRESHOLDS
    ) -> None:
        self._sample_rate = sample_rate
        self._thresholds = thresholds
        self._span = None if text is None else speech_span(text, thresholds)
        self._samples = 0
        self._at_full_scale = 0
        self._energy = 0.0
        self._finite = True

    @property
    def seconds(self) -> float:
        return self._samples / self._sample_rate

    def feed(self, samples: Samples) -> Finding | None:
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

    def finish(self, *, cut: bool = False) -> tuple[Finding, ...]:
        """Everything found in the utterance, the gravest first; empty for speech. One that was `cut` may be short."""
        hopeless = self._hopeless()
        if hopeless is Finding.NOT_FINITE:
            return (hopeless,)
        found = [hopeless] if hopeless else []
        if self._span is not None and self.seconds < self._shortest(self._span, cut=cut):
            found.append(Finding.TOO_SHORT)
        if self._energy <= self._thresholds.silence_rms**2 * self._samples:
            found.append(Finding.SILENT)
        if self._at_full_scale > self._thresholds.clipped_share * self._samples:
            found.append(Finding.CLIPPED)
        return tuple(found)

    def _shortest(self, span: SpeechSpan, *, cut: bool) -> float:
        return min(span.shortest, self._thresholds.shortest_cut_seconds) if cut else span.shortest

    def _hopeless(self) -> Finding | None:
        if not self._finite:
            return Finding.NOT_FINITE
        if self._span is not None and self.seconds > self._span.longest:
            return Finding.RUNAWAY
        return None


def check_speech(
    samples: Samples, sample_rate: int, text: str | None = None, thresholds: GuardThresholds = USUAL_THRESHOLDS
) -> tuple[Finding, ...]:
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
