"""Make the clips that `training.evaluate` judges: recordings of the teachers, their resynthesis, and speech of models.

    python -m training.clips --text training/text_corpus/sentences/heldout.txt --out build/quality/clips \\
        --sentences 104 --voices 2 --model tts=nano
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
from shoal.codec.dac import Codec
from shoal.engine.engine import Engine
from shoal.errors import InvalidRequest
from shoal.speech import SamplingParams
from training.codec import load_codec
from training.data import Corpus, Samples
from training.data.sound import to_int16, wav_bytes
from training.export import read_clip

TEACHER = "teacher"
SHIPPED = Path(__file__).parents[1] / "shoal" / "models" / "nano"
TOGETHER = 16  # utterances that an engine speaks at the same time


class Utterance(NamedTuple):
    samples: Samples  # recording of the teacher
    text: str
    voice: str


System = Callable[[Sequence[Utterance]], Iterable[Samples]]
Spoken = dict[str, tuple[list[Utterance], System]]  # utterances and the system that speaks them, by its name


def teacher(utterances: Sequence[Utterance]) -> Iterator[Samples]:
    return (utterance.samples for utterance in utterances)


def resynthesis(codec: Codec) -> System:
    """Encode each clip and decode it again, as a whole."""

    @torch.inference_mode()
    def speak(utterances: Sequence[Utterance]) -> Iterator[Samples]:
        for samples, _, _ in utterances:
            codes = codec.encode(torch.from_numpy(samples.astype(np.float32) / 32768)[None])
            yield to_int16(codec.decode(codes)[0, : samples.size].double().numpy())

    return speak


def speech(engine: Engine, sampling: SamplingParams) -> System:
    """Speak the text of each utterance with a model, in the voice of the utterance; each has its own seed."""

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
    """Return the utterances of the first `sentences` sentences, each in every voice or in `voices` voices.

    With every voice, the voices are compared on the same words. With `voices`, the voices take turns, so that the same
    number of clips covers more sentences.
    """
    spoken: dict[str, list[Utterance]] = {}
    for utterance in corpus:
        spoken.setdefault(utterance[1], []).append(Utterance(*utterance))
    kept = list(spoken.values())[:sentences]
    return [
        utterances[(number * (voices or 0) + turn) % len(utterances)]
        for number, utterances in enumerate(kept)
        for turn in range(min(voices or len(utterances), len(utterances)))
    ]


def read_sentences(text: Path, voices: Sequence[str], count: int | None, per_sentence: int) -> list[Utterance]:
    """Return the first `count` lines of a file, each for `per_sentence` voices, which take turns."""
    lines = [line for line in text.read_text().splitlines() if line.strip()][:count]
    turns = [
        (line, voices[(number * per_sentence + turn) % len(voices)])
        for number, line in enumerate(lines)
        for turn in range(min(per_sentence, len(voices)))
    ]
    return [Utterance(np.zeros(0, np.int16), line, voice) for line, voice in turns]


def bundled_recordings(folder: Path, sample_rate: int) -> list[Utterance]:
    """Return the recordings of a model's built-in voices, which are speech of its teacher."""
    found = {voice.name: sorted(voice.glob("sample-*.wav")) for voice in sorted(folder.iterdir())}
    clips = [(voice, read_clip(path, sample_rate)) for voice, paths in found.items() for path in paths]
    return [Utterance(samples, text, voice) for voice, (samples, text) in clips]


def write_clips(spoken: Spoken, out: Path, sample_rate: int) -> int:
    """Write the utterances of every system, and the manifest that names them all; return the number of clips."""
    rows = []
    for name, (utterances, speak) in spoken.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        for number, (utterance, samples) in enumerate(zip(utterances, speak(utterances), strict=True)):
            path = Path(name) / f"{number:04d}-{utterance.voice}.wav"
            (out / path).write_bytes(wav_bytes(samples, sample_rate))
            rows.append({"path": str(path), "text": utterance.text, "voice": utterance.voice, "system": name})
    (out / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


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
    """Override sampling defaults with settings such as `temperature=0.5`. Raises InvalidRequest for invalid ones."""
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
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--speech", type=Path, help="held-out shards of training.kokoro.produce")
    source.add_argument(
        "--text", type=Path, help="sentences for the models to speak; the teacher is what comes with nano"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for manifest.jsonl and a folder per system")
    parser.add_argument("--sample-rate", type=int, default=24_000, help="sample rate of the clips in Hz")
    parser.add_argument("--sentences", type=int, help="number of sentences to use, from the first on")
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
        help="sampling settings that replace the models' defaults; may be repeated",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    with ExitStack() as engines:
        models: dict[str, System] = {}
        for name, model in options.model:
            engine = engines.enter_context(shoal.load(model))
            models[name] = speech(engine, overridden(engine.service.default_sampling, options.sampling))
        chosen = spoken_text(options, models) if options.text else heard_speech(options, models)
        print(f"{write_clips(chosen, options.out, options.sample_rate)} clips in {options.out}")


def heard_speech(
    options: argparse.Namespace, models: Mapping[str, System]
) -> dict[str, tuple[list[Utterance], System]]:
    """Return the same utterances for the teacher, the codecs and the models."""
    codecs = {
        name: resynthesis(codec_at(Path(folder), options.sample_rate))
        for name, folder in options.codec or [("resynthesis", SHIPPED)]
    }
    utterances = chosen_utterances(Corpus(options.speech), options.sentences, options.voices)
    return {name: (utterances, system) for name, system in {TEACHER: teacher, **codecs, **models}.items()}


def spoken_text(options: argparse.Namespace, models: Mapping[str, System]) -> Spoken:
    """Return the sentences of `--text` for the models, and the recordings of nano's voices for the teacher."""
    recorded = bundled_recordings(SHIPPED / "voices", options.sample_rate)
    voices = sorted({utterance.voice for utterance in recorded})
    sentences = read_sentences(options.text, voices, options.sentences, options.voices or len(voices))
    return {TEACHER: (recorded, teacher), **{name: (sentences, system) for name, system in models.items()}}


if __name__ == "__main__":
    main()
