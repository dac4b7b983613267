"""Which voice says what in which shard: the whole corpus as a function of an index."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from training.data.voices import VOICES, Voice

UTTERANCES_PER_SHARD = 200
TEMPO_RANGE = 0.08
JOIN_SHARE = 0.25
MAX_JOINED_CHARACTERS = 200
# Seconds = intercept + slope * characters, over all voices; only to turn hours into a number of shards beforehand.
SECONDS_PER_UTTERANCE, SECONDS_PER_CHARACTER = 0.33, 0.0563


@dataclass(frozen=True, slots=True)
class Utterance:
    """What one voice says: usually one sentence, several when joined."""

    voice: Voice
    sentences: tuple[str, ...]
    tempo: float = 1.0

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


@dataclass(frozen=True)
class Plan:
    """The whole corpus as a function of an index.

    Sentences are shuffled once and read over and over. Voices take turns, and each pass over the text starts one voice
    later, so every stretch of the corpus is evenly mixed and a sentence comes back in another voice.
    """

    sentences: Sequence[str]
    voices: Sequence[Voice] = VOICES
    seed: int = 0
    vary_tempo: bool = False
    join: bool = False

    @cached_property
    def order(self) -> list[int]:
        order = list(range(len(self.sentences)))
        random.Random(f"order {self.seed}").shuffle(order)
        return order

    def utterance(self, index: int) -> Utterance:
        lap, place = divmod(index, len(self.sentences))
        voice = self.voices[(place + lap) % len(self.voices)]
        rng = random.Random(f"utterance {self.seed} {index}")
        tempo = round(1 + rng.uniform(-TEMPO_RANGE, TEMPO_RANGE), 3) if self.vary_tempo else 1.0
        sentences: tuple[str, ...] = (self.sentences[self.order[place]],)
        if self.join and rng.random() < JOIN_SHARE:
            sentences = joinable((*sentences, rng.choice(self.sentences)))
        return Utterance(voice, sentences, tempo)

    def shard(self, shard: int) -> list[Utterance]:
        first = shard * UTTERANCES_PER_SHARD
        return [self.utterance(index) for index in range(first, first + UTTERANCES_PER_SHARD)]

    def shards_for(self, hours: float) -> int:
        """Shards that last about `hours`, from the length of the text alone, so the count never depends on a run."""
        mean = sum(map(len, self.sentences)) / len(self.sentences)
        mean *= 1 + JOIN_SHARE * self.join
        seconds = SECONDS_PER_UTTERANCE + SECONDS_PER_CHARACTER * mean
        return math.ceil(hours * 3600 / (seconds * UTTERANCES_PER_SHARD))

    def settings(self) -> dict[str, object]:
        """What two runs must share to write into one folder. Hours and workers are free."""
        digest = hashlib.sha256("\n".join(self.sentences).encode()).hexdigest()
        return {
            "text_sha256": digest,
            "voices": [asdict(voice) for voice in self.voices],
            "seed": self.seed,
            "vary_tempo": self.vary_tempo,
            "join": self.join,
        }


@dataclass(frozen=True)
class HeldoutPlan(Plan):
    """Every sentence in every voice, once, as the teacher says it."""

    def utterance(self, index: int) -> Utterance:
        sentence, voice = divmod(index, len(self.voices))
        return Utterance(self.voices[voice], (self.sentences[sentence],))

    def shard(self, shard: int) -> list[Utterance]:
        first = shard * UTTERANCES_PER_SHARD
        last = min(first + UTTERANCES_PER_SHARD, len(self.sentences) * len(self.voices))
        return [self.utterance(index) for index in range(first, last)]

    def shards_for(self, hours: float) -> int:
        return math.ceil(len(self.sentences) * len(self.voices) / UTTERANCES_PER_SHARD)


def joinable(sentences: tuple[str, ...]) -> tuple[str, ...]:
    """The sentences if they make one utterance: each but the last closed, and short enough together."""
    if sum(map(len, sentences)) > MAX_JOINED_CHARACTERS:
        return sentences[:1]
    closed = (text if text[-1] in ".?!" else text.rstrip(",;:-") + "." for text in sentences[:-1])
    return (*closed, sentences[-1])
