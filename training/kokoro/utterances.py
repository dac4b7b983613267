"""Choice of utterances: which speaker says which phonemized line at which speed."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.kokoro.speakers import PLAIN, Speaker, Timbre, accent_of, heldout_mixes, training_speakers

SPEEDS = (0.9, 1.15)
HELDOUT_VOICES = ("af_heart", "af_nova", "af_sarah", "am_fenrir", "am_michael", "am_onyx", "bf_emma", "bm_george")
HELDOUT_MIXES, VOICE_SENTENCES, MIX_SENTENCES = 10, 10, 4

Line = dict[str, Any]  # one line that training.kokoro.phonemize wrote


@dataclass(frozen=True, slots=True)
class Utterance:
    """A phonemized line with its speaker. `words` holds (word, first, last + 1) in `phonemes`."""

    text: str
    phonemes: str
    words: list[tuple[str, int, int]]
    speaker: Speaker
    speed: float = 1.0
    timbre: Timbre = PLAIN


def read_phonemized(paths: Iterable[Path]) -> Iterator[Line]:
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from map(json.loads, file)


def training_utterances(
    lines: Sequence[Line], rng: random.Random, mixed_share: float, other_timbres: float = 0.0
) -> list[Utterance]:
    """Return the lines in random order, each with a speaker of its accent and a random speed."""
    accents = ("us", "gb")
    speakers = {accent: training_speakers(rng, accent, mixed_share, other_timbres) for accent in accents}
    shuffled = rng.sample(lines, len(lines))
    return [spoken(line, *next(speakers[line["accent"]]), round(rng.uniform(*SPEEDS), 3)) for line in shuffled]


def heldout_utterances(lines: Sequence[Line], rng: random.Random) -> list[Utterance]:
    """Return held-out sentences by eight voices (the same sentences each) and by mixes that training never uses."""
    by_accent = {accent: [line for line in lines if line["accent"] == accent] for accent in ("us", "gb")}
    voices: list[Speaker] = [{voice: 1.0} for voice in HELDOUT_VOICES]
    found = [spoken(line, voice) for voice in voices for line in by_accent[accent_of(voice)][:VOICE_SENTENCES]]
    for number, mix in enumerate(heldout_mixes(rng, HELDOUT_MIXES)):
        first = VOICE_SENTENCES + number * MIX_SENTENCES
        found += [spoken(line, mix) for line in by_accent[accent_of(mix)][first : first + MIX_SENTENCES]]
    return found


def spoken(line: Line, speaker: Speaker, timbre: Timbre = PLAIN, speed: float = 1.0) -> Utterance:
    return Utterance(line["text"], line["phonemes"], line["words"], speaker, speed, timbre)
