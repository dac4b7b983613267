"""Turn recordings of people into shards of speech, so that the language model learns to follow real voices.

    python -m training.people --recordings DIR --digits DIR --out build/lm/people --heldout-out build/lm/people-heldout

`--recordings` holds files `SPEAKER-*.flac`, one or more of each speaker, as LibriSpeech names them. They are cut at
pauses, and the speech recogniser of the judges writes down what is said. `--digits` holds AudioMNIST: single digits,
which are joined to strings. Every recording is written at several vocal tract lengths: each is another speaker.
"""

from __future__ import annotations

import argparse
import json
import random
import wave
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.data import shard_stem, to_int16, write_whole
from training.kokoro.teacher import SAMPLE_RATE

TRACTS = (1.0, 0.92, 1.08, 0.85, 1.16, 0.96, 1.04)
FIRST_SHARD = 90_001  # after all shards of the teacher in the same folder of codes
HELD_OUT_EVERY = 12  # every twelfth speaker is held out
HEARD_RATE = 16_000
QUIET = 10 ** (-28 / 20)  # level relative to the loud blocks of a recording
PAUSE_BLOCKS, SHORTEST_BLOCKS = 22, 220  # numbers of blocks of 10 ms
SECONDS = (1.5, 11.0)
CHARACTERS_PER_SECOND = (7.0, 24.0)  # outside of this range the recogniser has missed or invented words
LEAST_WORDS = 3
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
STRINGS_PER_SPEAKER, TAKES, UNUSED_EVERY = 9, 50, 6

Waveform = NDArray[np.float32]
Hear = Callable[[Waveform], str]


@dataclass(frozen=True)
class Passage:
    """Speech of one person: samples [n] at `rate`, scaled to a peak of 0.5."""

    speaker: str
    text: str
    samples: Waveform
    rate: int


def loud_blocks(samples: Waveform, rate: int) -> NDArray[np.bool_]:
    """Return which blocks of 10 ms are speech."""
    block = rate // 100
    if len(samples) < block:
        return np.zeros(0, np.bool_)
    level = np.sqrt(np.square(samples[: len(samples) // block * block]).reshape(-1, block).mean(1) + 1e-12)
    return np.asarray(level >= np.percentile(level, 95) * QUIET)


def cut_at_pauses(samples: Waveform, rate: int) -> list[Waveform]:
    """Return the parts between pauses, each at least SHORTEST_BLOCKS long, without silence around them."""
    loud = loud_blocks(samples, rate)
    # Start and end of each quiet stretch.
    edges = np.flatnonzero(np.diff(np.concatenate(([True], loud, [True])))).reshape(-1, 2)
    cuts = [int(begin + end) // 2 for begin, end in edges if end - begin >= PAUSE_BLOCKS]
    places = [0]
    for cut in (*cuts, len(loud)):
        if cut - places[-1] >= SHORTEST_BLOCKS or cut == len(loud):
            places.append(cut)
    block = rate // 100
    return [trimmed(samples[begin * block : end * block], rate) for begin, end in pairwise(places) if end > begin]


def trimmed(samples: Waveform, rate: int, before: int = 8, after: int = 14) -> Waveform:
    """Return samples with at most `before` and `after` blocks of 10 ms around the speech."""
    spoken, block = np.flatnonzero(loud_blocks(samples, rate)), rate // 100
    if not len(spoken):
        return samples[:0]
    return samples[max(0, int(spoken[0]) - before) * block : (int(spoken[-1]) + after) * block]


def leveled(samples: Waveform, peak: float = 0.5) -> Waveform:
    return np.asarray(samples * (peak / max(float(np.abs(samples).max()), 1e-3)), np.float32)


def passages(paths: Iterable[Path], hear: Hear) -> Iterator[Passage]:
    """Yield the passages of recordings whose text the recogniser could write down."""
    for path in paths:
        for part in cut_at_pauses(read(path, HEARD_RATE), HEARD_RATE):
            seconds = len(part) / HEARD_RATE
            if not SECONDS[0] < seconds < SECONDS[1]:
                continue
            text = hear(part).strip()
            low, high = CHARACTERS_PER_SECOND
            if len(text.split()) >= LEAST_WORDS and low < len(text) / seconds < high:
                yield Passage(path.stem.split("-")[0], text, leveled(part), HEARD_RATE)


def digit_strings(folder: Path, rng: random.Random) -> Iterator[Passage]:
    """Yield strings of three to six digits of each speaker `folder/SPEAKER/DIGIT_SPEAKER_TAKE.wav`."""
    for speaker in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        if int(speaker) % UNUSED_EVERY == 0:  # kept for measurements
            continue
        for _ in range(STRINGS_PER_SPEAKER):
            said = [rng.randrange(10) for _ in range(rng.randint(3, 6))]
            takes = [read_wav(folder / speaker / f"{digit}_{speaker}_{rng.randrange(TAKES)}.wav") for digit in said]
            rate = takes[0][1]
            gap = np.zeros(int(rate * rng.uniform(0.05, 0.14)), np.float32)
            parts = [each for samples, _ in takes for each in (trimmed(samples, rate, 3, 4), gap)]
            text = ", ".join(DIGITS[digit] for digit in said).capitalize() + "."
            yield Passage(f"digits{speaker}", text, leveled(np.concatenate([gap, *parts])), rate)


def read(path: Path, rate: int) -> Waveform:
    """Return a file as mono samples at `rate`."""
    import av
    import soxr

    with av.open(str(path)) as file:
        stream = file.streams.audio[0]
        mono = av.AudioResampler("flt", "mono", stream.rate)
        parts = [part.to_ndarray()[0] for frame in file.decode(stream) for part in mono.resample(frame)]
        return np.asarray(soxr.resample(np.concatenate(parts), stream.rate, rate), np.float32)


def read_wav(path: Path) -> tuple[Waveform, int]:
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return (samples / 32768).astype(np.float32), file.getframerate()


def write_passages(out: Path, shard: int, said: Sequence[Passage], tract: float) -> None:
    """Write one shard in which every speaker's vocal tract is `tract` times as long, at random levels."""
    import soxr

    rng = random.Random(shard)
    lines, parts, offset = [], [], 0
    for each in said:
        longer = soxr.resample(each.samples, each.rate, SAMPLE_RATE * tract, quality="VHQ")
        samples = to_int16(leveled(longer, rng.uniform(0.25, 0.7)).astype(np.float64))
        voice = each.speaker if tract == 1.0 else f"{each.speaker}*{tract}"
        lines.append(json.dumps({"voice": voice, "text": each.text, "offset": offset, "samples": len(samples)}) + "\n")
        parts.append(samples.astype("<i2").tobytes())
        offset += len(samples)
    stem = shard_stem(out, shard)
    write_whole(stem.with_suffix(".pcm"), b"".join(parts))
    write_whole(stem.with_suffix(".jsonl"), "".join(lines).encode())


def write_people(said: Sequence[Passage], digits: Sequence[Passage], out: Path, heldout_out: Path) -> None:
    """Write held-out speakers with their own vocal tract length, and the others with each length of TRACTS."""
    for folder in (out, heldout_out):
        folder.mkdir(parents=True, exist_ok=True)
    held_out = set(sorted({each.speaker for each in said})[HELD_OUT_EVERY // 2 - 1 :: HELD_OUT_EVERY])
    write_passages(heldout_out, 1, [each for each in said if each.speaker in held_out], 1.0)
    train = [each for each in said if each.speaker not in held_out]
    for shard, tract in enumerate(TRACTS, FIRST_SHARD):
        write_passages(out, shard, train, tract)
    if digits:
        write_passages(out, FIRST_SHARD + len(TRACTS), digits, 1.0)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.people", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recordings", type=Path, required=True, help="folder of SPEAKER-*.flac")
    parser.add_argument("--digits", type=Path, help="folder `data` of AudioMNIST")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards to train on")
    parser.add_argument("--heldout-out", type=Path, required=True, help="folder for the shard of held-out speakers")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    from training.judges import Transcriber

    options = parse_arguments(arguments)
    said = list(passages(sorted(options.recordings.glob("*.flac")), Transcriber()))
    digits = [] if options.digits is None else list(digit_strings(options.digits, random.Random(3)))
    write_people(said, digits, options.out, options.heldout_out)
    speakers, minutes = len({each.speaker for each in said}), sum(len(each.samples) / each.rate for each in said) / 60
    print(f"{speakers} speakers, {len(said)} passages, {minutes:.0f} minutes; {len(digits)} strings of digits")


if __name__ == "__main__":
    main()
