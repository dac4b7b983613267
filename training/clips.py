"""Make the clips that `training.evaluate` judges: what the teachers said, codecs' resynthesis of it, and speech.

    python -m training.data --heldout --text training/text_corpus/sentences/heldout.txt --teachers build/teachers \\
        --out build/quality/speech
    python -m training.clips --speech build/quality/speech --out build/quality/clips --sentences 25 --model tts=nano
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import shoal
from shoal.audio.wav import wav_header
from shoal.codec.dac import Codec
from shoal.engine.engine import Engine
from shoal.errors import InvalidRequest
from shoal.speech import SamplingParams
from training.codec import load_codec
from training.data import SAMPLE_RATE, Corpus, Samples
from training.data.sound import to_int16

TEACHER = "teacher"
SHIPPED = Path(__file__).parents[1] / "shoal" / "models" / "nano"
TOGETHER = 16  # utterances that an engine speaks at a time


class Utterance(NamedTuple):
    samples: Samples  # as its teacher said it
    text: str
    voice: str


System = Callable[[Sequence[Utterance]], Iterable[Samples]]


def teacher(utterances: Sequence[Utterance]) -> Iterator[Samples]:
    return (utterance.samples for utterance in utterances)


def resynthesis(codec: Codec) -> System:
    """Through the codes and back, whole clips at once."""

    @torch.inference_mode()
    def speak(utterances: Sequence[Utterance]) -> Iterator[Samples]:
        for samples, _, _ in utterances:
            codes = codec.encode(torch.from_numpy(samples.astype(np.float32) / 32768)[None])
            yield to_int16(codec.decode(codes)[0, : samples.size].double().numpy())

    return speak


def speech(engine: Engine, sampling: SamplingParams) -> System:
    """The text of each utterance, spoken by a model in its voice of that name; every utterance has its own seed."""

    async def say(number: int, utterance: Utterance, gate: asyncio.Semaphore) -> Samples:
        async with gate:
            own = replace(sampling, seed=sampling.seed + number)
            said = await engine.aspeak(utterance.text, voice=utterance.voice, sampling=own)
        return to_int16(said.samples.astype(np.float64))

    async def say_all(utterances: Sequence[Utterance]) -> list[Samples]:
        gate = asyncio.Semaphore(TOGETHER)
        return await asyncio.gather(*(say(number, each, gate) for number, each in enumerate(utterances)))

    return lambda utterances: asyncio.run(say_all(utterances))


def chosen_utterances(corpus: Corpus, sentences: int | None, voices: int | None) -> list[Utterance]:
    """Those of the first sentences: in every voice, so that voices are compared on the same words, or in so many
    voices each, which take turns, so that the same number of clips covers more sentences."""
    spoken: dict[str, list[Utterance]] = {}
    for utterance in corpus:
        spoken.setdefault(utterance[1], []).append(Utterance(*utterance))
    kept = list(spoken.values())[:sentences]
    return [
        utterances[(number * (voices or 0) + turn) % len(utterances)]
        for number, utterances in enumerate(kept)
        for turn in range(min(voices or len(utterances), len(utterances)))
    ]


def write_clips(utterances: Sequence[Utterance], systems: Mapping[str, System], out: Path, sample_rate: int) -> int:
    """Write each utterance by every system, and the manifest that names them all; return the number of clips."""
    rows = []
    for name, speak in systems.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        for number, (utterance, samples) in enumerate(zip(utterances, speak(utterances), strict=True)):
            path = Path(name) / f"{number:04d}-{utterance.voice}.wav"
            (out / path).write_bytes(wav_bytes(samples, sample_rate))
            rows.append({"path": str(path), "text": utterance.text, "voice": utterance.voice, "system": name})
    (out / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


def wav_bytes(samples: Samples, sample_rate: int) -> bytes:
    content = samples.astype("<i2").tobytes()
    return wav_header(sample_rate, len(content)) + content


def codec_at(folder: Path, sample_rate: int) -> Codec:
    """Load a codec; raise InvalidRequest if it has another sample rate than the clips."""
    codec = load_codec(folder).eval()
    if codec.config.sample_rate != sample_rate:
        raise InvalidRequest(
            f"{folder} is a codec of {codec.config.sample_rate} Hz, but --sample-rate is {sample_rate}"
        )
    return codec


def named(argument: str) -> tuple[str, str]:
    name, _, what = argument.partition("=")
    if not name or not what:
        raise argparse.ArgumentTypeError(f"{argument!r} is not NAME=DIR")
    return name, what


def overridden(sampling: SamplingParams, changes: Sequence[str]) -> SamplingParams:
    """`temperature=0.5` and the like, over what the model usually does; raises InvalidRequest for what cannot be."""
    known = asdict(sampling)
    for change in changes:
        name, _, value = change.partition("=")
        if name not in known:
            raise InvalidRequest(f"{change!r}: sampling has {', '.join(known)}")
        try:
            known[name] = type(known[name])(value)
        except ValueError as problem:
            raise InvalidRequest(f"{change!r}: {problem}") from problem
    return SamplingParams(**known)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "Make the clips that training.evaluate judges: of teachers, codecs and whole models."
    parser = argparse.ArgumentParser(prog="python -m training.clips", description=about)
    parser.add_argument(
        "--speech", type=Path, required=True, help="held-out shards of training.data or training.kokoro"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for manifest.jsonl and a folder per system")
    parser.add_argument("--sample-rate", type=int, default=SAMPLE_RATE, help="sample rate of --speech in Hz")
    parser.add_argument("--sentences", type=int, help="only the first so many")
    parser.add_argument("--voices", type=int, help="voices per sentence, taking turns (default: every voice)")
    parser.add_argument(
        "--codec",
        type=named,
        action="append",
        metavar="NAME=DIR",
        help="a system and its codec; may be repeated (default: resynthesis=the shipped one)",
    )
    parser.add_argument(
        "--model",
        type=named,
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="a system and the model that speaks for it; may be repeated",
    )
    parser.add_argument(
        "--sampling",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="how the models draw, over their usual; may be repeated",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    systems: dict[str, System] = {TEACHER: teacher}
    for name, folder in options.codec or [("resynthesis", SHIPPED)]:
        systems[name] = resynthesis(codec_at(Path(folder), options.sample_rate))
    with ExitStack() as engines:
        for name, model in options.model:
            engine = engines.enter_context(shoal.load(model))
            systems[name] = speech(engine, overridden(engine.service.default_sampling, options.sampling))
        utterances = chosen_utterances(Corpus(options.speech), options.sentences, options.voices)
        count = write_clips(utterances, systems, options.out, options.sample_rate)
        print(f"{count} clips in {options.out}")


if __name__ == "__main__":
    main()
