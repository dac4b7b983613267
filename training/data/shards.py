"""Shards on disk: recorded, written so that none is ever half there, and read line by line."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from training.data.plan import Plan, Utterance
from training.data.sound import SAMPLE_RATE, Samples, Signal, level, plausible, to_int16, trim, whole_frames
from training.data.teachers import TeacherFailed, Teachers

logger = logging.getLogger(__name__)

JOIN_GAP_SECONDS = 0.25


class CorpusMismatch(ValueError):
    """The folder holds a corpus made from another plan."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a shard's `.jsonl`: who says what, and where in the `.pcm` (both counted in samples)."""

    voice: str
    text: str
    offset: int
    samples: int


def record(utterance: Utterance, teachers: Teachers) -> Samples:
    """The finished samples of an utterance; raises TeacherFailed."""
    gap = np.zeros(round(JOIN_GAP_SECONDS * SAMPLE_RATE))
    parts: list[Signal] = []
    for sentence in utterance.sentences:
        speech = level(trim(teachers.speak(utterance.voice, sentence, utterance.tempo)))
        if not plausible(sentence, speech.size):
            raise TeacherFailed(f"{speech.size} samples cannot be {sentence!r}")
        parts += [gap, speech] if parts else [speech]
    return to_int16(whole_frames(np.concatenate(parts)))


def shard_stem(out: Path, shard: int) -> Path:
    return out / f"shard-{shard:05d}"


def is_complete(out: Path, shard: int) -> bool:
    return shard_stem(out, shard).with_suffix(".jsonl").exists()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is either absent or complete, whenever we are stopped."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def write_shard(out: Path, shard: int, utterances: Iterable[Utterance], teachers: Teachers) -> None:
    """Record and store one shard. A sentence its teacher cannot say is left out, and said so."""
    lines: list[Line] = []
    recordings: list[Samples] = []
    offset = 0
    for utterance in utterances:
        try:
            samples = record(utterance, teachers)
        except TeacherFailed as error:
            logger.warning("shard %d leaves out an utterance of %s: %s", shard, utterance.voice.name, error)
            continue
        lines.append(Line(utterance.voice.name, utterance.text, offset, samples.size))
        recordings.append(samples)
        offset += samples.size
    stem = shard_stem(out, shard)
    pcm = b"".join(samples.astype("<i2").tobytes() for samples in recordings)
    write_whole(stem.with_suffix(".pcm"), pcm)
    # Last: readers take this file as the promise that the samples are there.
    write_whole(stem.with_suffix(".jsonl"), b"".join(json.dumps(asdict(line)).encode() + b"\n" for line in lines))


def read_lines(path: Path) -> list[Line]:
    """Read a shard's lines. Fields besides those of Line, such as word times, are left out."""
    names = [entry.name for entry in fields(Line)]
    stored = map(json.loads, path.read_text().splitlines())
    return [Line(**{name: line[name] for name in names}) for line in stored]


def claim(out: Path, plan: Plan) -> None:
    """Make the folder this plan's own, or raise CorpusMismatch if it holds another corpus."""
    out.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(plan.settings(), indent=1)
    path = out / "plan.json"
    if path.exists() and path.read_text() != settings:
        raise CorpusMismatch(
            f"{out} holds a corpus made from other text, voices, seed or options; choose another --out"
        )
    write_whole(path, settings.encode())
    write_whole(out / "voices.json", json.dumps([voice.name for voice in plan.voices]).encode())
