"""Speakers of the teacher: its voices alone, and random convex mixes of two or three of them, some in another timbre.

All mixes lie between the teacher's voices. A model that is to follow recordings of people needs speakers outside of
them: another vocal tract, another pitch, another frequency response, the same in all utterances of the speaker.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# bm_fable has background noise and bm_lewis is misheard (WER 6.5 %), so neither is used.
US = (
    *("af_alloy", "af_aoede", "af_bella", "af_heart", "af_jessica", "af_kore", "af_nicole", "af_nova", "af_river"),
    *("af_sarah", "af_sky", "am_adam", "am_echo", "am_eric", "am_fenrir", "am_liam", "am_michael", "am_onyx"),
    *("am_puck", "am_santa"),
)
GB = ("bf_alice", "bf_emma", "bf_isabella", "bf_lily", "bm_daniel", "bm_george")
HELDOUT_SHARE = 0.05
MIX_UTTERANCES = (2, 6)  # utterances per mixed speaker, so that each has references of its own

TRACTS = (0.86, 0.9, 0.94, 1.0, 1.06, 1.11, 1.16)
PITCHES = (0.82, 1.22)
RESPONSE_SHARE = 0.6  # share of the speakers with another timbre that have their own frequency response

Speaker = dict[str, float]  # voice -> weight, the heaviest first


@dataclass(frozen=True, slots=True)
class Timbre:
    """Changes of the teacher's speech that make another speaker."""

    tract: float = 1.0  # length of the vocal tract; below one, formants and pitch are higher
    pitch: float = 1.0  # factor of the fundamental frequency, before the tract is scaled
    response: int = 0  # seed of a frequency response; 0 is a flat one

    def __str__(self) -> str:
        return f"t{self.tract:.2f}p{self.pitch:.2f}r{self.response}"


PLAIN = Timbre()


def accent_of(speaker: Speaker) -> str:
    """Return the accent of the heaviest voice, us or gb."""
    return "gb" if next(iter(speaker)) in GB else "us"


def speaker_name(speaker: Speaker) -> str:
    """Return the voice's name, or voices and weights such as `af_heart.600+bm_george.400`."""
    if len(speaker) == 1:
        return next(iter(speaker))
    return "+".join(f"{voice}.{round(1000 * weight):03d}" for voice, weight in speaker.items())


def voice_name(speaker: Speaker, timbre: Timbre) -> str:
    """Return the speaker's name, followed by the timbre if it is changed."""
    return speaker_name(speaker) if timbre == PLAIN else f"{speaker_name(speaker)}*{timbre}"


def random_timbre(rng: random.Random) -> Timbre:
    low, high = PITCHES
    response = rng.randrange(1, 1 << 30) if rng.random() < RESPONSE_SHARE else 0
    return Timbre(rng.choice(TRACTS), round(low * (high / low) ** rng.random(), 2), response)


def random_mix(rng: random.Random, accent: str) -> Speaker:
    """Return a mix whose heaviest voice has `accent`; the others are of either accent."""
    first = rng.choice(GB if accent == "gb" else US)
    others = rng.sample([voice for voice in (*US, *GB) if voice != first], rng.choice((1, 2)))
    weights = sorted((rng.expovariate(1) for _ in range(1 + len(others))), reverse=True)
    return {voice: round(weight / sum(weights), 3) for voice, weight in zip((first, *others), weights, strict=True)}


def is_held_out(speaker: Speaker) -> bool:
    """Return whether no model may train on this mix. Depends on the mix alone; voices alone are never held out."""
    if len(speaker) == 1:
        return False
    digest = hashlib.blake2b(json.dumps(sorted(speaker.items())).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < HELDOUT_SHARE


def training_speakers(
    rng: random.Random, accent: str, mixed_share: float, other_timbres: float = 0.0
) -> Iterator[tuple[Speaker, Timbre]]:
    """Yield a speaker for each utterance, without end; a mixed speaker comes 2 to 6 times in a row.

    A share `other_timbres` of the mixed speakers has another timbre.
    """
    voices = GB if accent == "gb" else US
    while True:
        if rng.random() >= mixed_share / (mixed_share + sum(MIX_UTTERANCES) / 2 * (1 - mixed_share)):
            yield {rng.choice(voices): 1.0}, PLAIN
            continue
        mix = random_mix(rng, accent)
        if not is_held_out(mix):
            timbre = random_timbre(rng) if rng.random() < other_timbres else PLAIN
            for _ in range(rng.randint(*MIX_UTTERANCES)):
                yield mix, timbre


def heldout_mixes(rng: random.Random, count: int) -> Sequence[Speaker]:
    """Return `count` mixes that training never uses, the accents in turn."""
    found: list[Speaker] = []
    while len(found) < count:
        mix = random_mix(rng, ("us", "gb")[len(found) % 2])
        if is_held_out(mix):
            found.append(mix)
    return found
