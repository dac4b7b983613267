"""Named voices of `nano`: the teacher's voice that speaks each of them, and reference recordings.

    python -m training.kokoro.voices --model DIR --utterances references.jsonl.gz --out DIR

`--utterances` is what `training.kokoro.phonemize` makes of `REFERENCES`, in both accents.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from training.data.sound import wav_bytes
from training.kokoro.recordings import Recording, record
from training.kokoro.speakers import accent_of
from training.kokoro.teacher import SAMPLE_RATE, Teacher
from training.kokoro.utterances import Line, Utterance, read_phonemized, spoken

# Sentences with many different sounds in little time: a calm statement and a question.
REFERENCES = (
    "The early sun shone through the kitchen window while we made breakfast for the children.",
    "Would you rather join us for a walk along the river, or stay here and finish your book?",
)


@dataclass(frozen=True)
class NamedVoice:
    """A voice as it is shipped; `teacher` is the voice of Kokoro that speaks it."""

    teacher: str
    title: str
    gender: str
    accent: str
    description: str = ""


# The names are our own: no name of the teacher's voices or of a commercial service's.
VOICES: Mapping[str, NamedVoice] = {
    "otis": NamedVoice("am_michael", "Otis", "male", "American", "Low and even; the default."),
    "emmett": NamedVoice("am_echo", "Emmett", "male", "American", "Low, with a lively melody."),
    "casper": NamedVoice("am_liam", "Casper", "male", "American", "Medium pitch, brisk, with a wide melody."),
    "wendell": NamedVoice("am_onyx", "Wendell", "male", "American", "The deepest voice, with a narrow melody."),
    "maren": NamedVoice("af_river", "Maren", "female", "American", "Medium pitch, brisk, with a narrow melody."),
    "nell": NamedVoice("af_sky", "Nell", "female", "American", "Low for a woman's voice, lively."),
    "romy": NamedVoice("af_nova", "Romy", "female", "American", "Low for a woman's voice, even."),
    "willa": NamedVoice("af_kore", "Willa", "female", "American", "Low for a woman's voice, with a wide melody."),
    "edmund": NamedVoice("bm_daniel", "Edmund", "male", "British", "Medium pitch, even."),
    "rupert": NamedVoice("bm_george", "Rupert", "male", "British", "Higher and unhurried."),
    "hattie": NamedVoice("bf_lily", "Hattie", "female", "British", "High, with a lively melody."),
    "imogen": NamedVoice("bf_emma", "Imogen", "female", "British", "Medium pitch, brisk and even."),
}


def reference_utterances(lines: Sequence[Line]) -> list[tuple[str, Utterance]]:
    """Return each named voice with each of its reference sentences, in its accent."""
    return [
        (name, spoken(line, {voice.teacher: 1.0}))
        for name, voice in VOICES.items()
        for line in lines
        if line["accent"] == accent_of({voice.teacher: 1.0})
    ]


def write_references(folder: Path, names: Sequence[str], recordings: Sequence[Recording]) -> None:
    """Write NAME/sample-N.wav and its transcript NAME/sample-N.lab."""
    counts: dict[str, int] = {}
    for name, recording in zip(names, recordings, strict=True):
        counts[name] = counts.get(name, 0) + 1
        stem = folder / name / f"sample-{counts[name]}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".wav").write_bytes(wav_bytes(recording.samples, SAMPLE_RATE))
        stem.with_suffix(".lab").write_text(recording.utterance.text + "\n")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.kokoro.voices", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="folder that training.kokoro.convert wrote")
    parser.add_argument("--utterances", type=Path, required=True, help="the reference sentences, phonemized")
    parser.add_argument("--out", type=Path, required=True, help="folder for the recordings")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.manual_seed(0)
    named = reference_utterances(list(read_phonemized([options.utterances])))
    order = {id(utterance): place for place, (_, utterance) in enumerate(named)}
    teacher = Teacher(options.model, options.device, torch.float32)
    made = record(teacher, [utterance for _, utterance in named], random.Random(0), 0.0, 20)
    recordings = sorted(made, key=lambda recording: order[id(recording.utterance)])
    write_references(options.out, [name for name, _ in named], recordings)


if __name__ == "__main__":
    main()
