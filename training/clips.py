"""Make the clips that `training.evaluate` judges: what the teachers said, and codecs' resynthesis of it.

    python -m training.data --heldout --text training/text_corpus/sentences/heldout.txt --teachers build/teachers \\
        --out build/quality/speech
    python -m training.clips --speech build/quality/speech --out build/quality/clips --sentences 25
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from shoal.audio.wav import wav_header
from shoal.codec.dac import Codec
from training.codec import load_codec
from training.data import SAMPLE_RATE, Corpus, Samples
from training.data.sound import to_int16

TEACHER = "teacher"
SHIPPED = Path(__file__).parents[1] / "shoal" / "models" / "nano"
System = Callable[[Samples], Samples]


def resynthesis(codec: Codec) -> System:
    """Through the codes and back, whole clips at once."""

    @torch.inference_mode()
    def speak(samples: Samples) -> Samples:
        codes = codec.encode(torch.from_numpy(samples.astype(np.float32) / 32768)[None])
        return to_int16(codec.decode(codes)[0, : samples.size].double().numpy())

    return speak


def first_utterances(corpus: Corpus, sentences: int | None) -> Iterator[tuple[Samples, str, str]]:
    """Those of the first sentences, in every voice, so that the voices are compared on the same words."""
    kept = set(list(dict.fromkeys(text for _, text, _ in corpus))[:sentences])
    return (utterance for utterance in corpus if utterance[1] in kept)


def write_clips(utterances: Iterator[tuple[Samples, str, str]], systems: Mapping[str, System], out: Path) -> int:
    """Each utterance by every system, and the manifest that names them all; returns the number of clips."""
    rows = []
    for name in systems:
        (out / name).mkdir(parents=True, exist_ok=True)
    for number, (samples, text, voice) in enumerate(utterances):
        for name, speak in systems.items():
            path = Path(name) / f"{number:04d}-{voice}.wav"
            (out / path).write_bytes(wav_bytes(speak(samples)))
            rows.append({"path": str(path), "text": text, "voice": voice, "system": name})
    (out / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


def wav_bytes(samples: Samples) -> bytes:
    content = samples.astype("<i2").tobytes()
    return wav_header(SAMPLE_RATE, len(content)) + content


def named_codec(argument: str) -> tuple[str, Path]:
    name, _, folder = argument.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{argument!r} is not NAME=DIR")
    return name, Path(folder)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "Make the clips that training.evaluate judges: what the teachers said, and codecs' resynthesis of it."
    parser = argparse.ArgumentParser(prog="python -m training.clips", description=about)
    parser.add_argument("--speech", type=Path, required=True, help="shards of training.data --heldout")
    parser.add_argument("--out", type=Path, required=True, help="folder for manifest.jsonl and a folder per system")
    parser.add_argument("--sentences", type=int, help="only the first so many, each in every voice")
    parser.add_argument(
        "--codec",
        type=named_codec,
        action="append",
        metavar="NAME=DIR",
        help="a system and its codec; may be repeated (default: resynthesis=the shipped one)",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    systems: dict[str, System] = {TEACHER: lambda samples: samples}
    for name, folder in options.codec or [("resynthesis", SHIPPED)]:
        systems[name] = resynthesis(load_codec(folder).eval())
    utterances = first_utterances(Corpus(options.speech), options.sentences)
    print(f"{write_clips(utterances, systems, options.out)} clips in {options.out}")


if __name__ == "__main__":
    main()
