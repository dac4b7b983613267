"""Make the directory that is shipped as `nano` from a trained language model, its codec and recordings of its voices.

    python -m training.export --language build/nano-lm/best --codec build/nano-codec --clips build/references \\
        --out shoal/models/nano

The result is an ordinary checkpoint directory: `shoal.load("nano")` reads it through the same code as any other. It is
written whole or not at all, and not if it is larger than MOST_BYTES.
"""

from __future__ import annotations

import argparse
import json
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file

from shoal.checkpoint.format.model_config import config_document
from shoal.checkpoint.format.profile import ModelProfile, profile_document
from shoal.checkpoint.load import Checkpoint, load_checkpoint, load_model
from shoal.checkpoint.random import write_synthetic_tokenizer
from shoal.checkpoint.save import atomic_directory, upstream_tensors, write_json
from shoal.codec.dac import Codec
from shoal.model.dual_ar import DualAR
from shoal.speech import SamplingParams
from shoal.voices.description import NO_DESCRIPTION, VoiceDescription
from shoal.voices.encoder import CodecEncoder, codec_fingerprint
from shoal.voices.store import VoiceStore
from training.codec import save_codec
from training.data import Samples
from training.data.sound import wav_bytes
from training.encode import About, frozen_codec, prompts_for
from training.int8 import int8_tensors
from training.kokoro.voices import VOICES

MOST_BYTES = 60_000_000
FIGURES = Path(__file__).with_name("figures.md")  # measurements of the edition that is shipped

Storage = Literal["int8", "fp16"]
Clip = tuple[Samples, str]  # a recording and what is said in it

PROFILE = ModelProfile(
    sampling=SamplingParams(temperature=0.7, top_p=0.5, repetition_penalty=1.0, max_frames=512),
    # About one sentence: the model was trained on single sentences.
    chunk_bytes=90,
    context_tokens=640,
    sentence_turns=True,
    min_duration=0.6,
    hold_seconds=0.5,
    normalize=True,
    clones=True,
    voice="otis",
)

CARD = """\
# nano

A small English text-to-speech model of the DualAR family: a language model of {parameters:.1f} million parameters and
a causal codec of {codec_parameters:.1f} million; {codebooks} codebooks at {frame_rate:g} frames a second, {sample_rate}
samples a second.

| | |
| --- | --- |
| voices | {voices} |
| language | English, written words; numbers, dates and symbols are spelled out before they are spoken |
| storage | language model {storage}, codec fp16; {megabytes:.1f} MB in all |
| held-out cross-entropy, main token + mean of the other codebooks | {entropies} |

## Origin

Nearly all speech it learned from is synthetic: Kokoro-82M (Apache License 2.0), 26 of its English voices and random
mixes of two or three of them, some with another vocal tract, pitch and frequency response, reading WordNet definitions
and examples and templates written for this project. The language model also learned from recordings of 248 people: 35
minutes of LibriSpeech (CC BY 4.0; 198 speakers) and 25 minutes of AudioMNIST (MIT License; 50 speakers, digits).
`training/README.md` has every command. All notices are in NOTICE.md. The names of the voices are this project's own;
none of them is a person's voice.

## Limits

- It speaks English only.
- It takes on part of a person's voice from a recording, not all of it: of ten unknown people, the clips were
  nearest to the right one among 20 in 22 to 42 %, by the judge (`docs/quality.md`). S1-mini and S2-Pro follow a voice
  closely. Use only recordings of people who have agreed.
- Rare words, names and abbreviations may be mispronounced: it reads letters, not phonemes.
- Sampling is random; with the same seed and text it says the same.

## Quality

{figures}"""

NOTICE = """\
# Notices

The weights in this directory were trained by the scripts in `training/` and are under the licence of the project, the
Apache License 2.0 (the file LICENSE at the root of the project).

They were trained on the output of programs, and on text, by others:

- Trained on speech synthesized with Kokoro-82M by hexgrad (Apache License 2.0), from the int8 ONNX export of
  kokoro-onnx by thewh1teagle (MIT License).
- Training phonemes by hibari, Copyright 2026 Maureese Williams (Apache License 2.0), which includes misaki lexicons and
  rules by hexgrad (Apache License 2.0) and spaCy tokenizer rules by ExplosionAI GmbH (MIT License).
- Recordings of LibriSpeech, Copyright 2014 by Vassil Panayotov (Creative Commons Attribution 4.0 International, see
  https://creativecommons.org/licenses/by/4.0/), cut at pauses, resampled and transcribed again; from the excerpts in
  the repository of Resemblyzer.
- Recordings of AudioMNIST, Copyright 2018 soerenab (MIT License), joined to strings of digits.
- WordNet 3.0, Copyright 2006 by Princeton University, the WordNet licence: use, copying, modification and distribution
  free of charge, with its notice kept.
"""


@dataclass(frozen=True)
class Parts:
    """Parts of the exported model."""

    model: DualAR
    codec: Codec
    about: About
    trained: dict[str, Any]


def read_parts(language: Path, codec: Path) -> Parts:
    """Read the trained model and its codec. Raises ValueError if the model was trained on another codec."""
    about = About.read(language)
    frozen = frozen_codec(codec, about.codebooks)
    if codec_fingerprint(frozen) != about.fingerprint:
        raise ValueError(f"{language} was trained on codes of another codec than {codec}")
    tokenizer = prompts_for(about).grid.tokenizer
    trained = json.loads((language / "trained.json").read_text())
    return Parts(load_model(language, tokenizer, dtype=torch.float32), frozen, about, trained)


def export(
    parts: Parts,
    clips: Mapping[str, Sequence[Clip]],
    out: Path,
    *,
    storage: Storage,
    descriptions: Mapping[str, VoiceDescription] = MappingProxyType({}),
) -> int:
    """Write the directory and return its size in bytes; raises ValueError when it is too large."""
    with atomic_directory(out) as folder:
        profile = PROFILE if PROFILE.voice in clips else replace(PROFILE, voice=None)
        write_language_model(folder, parts.model, profile, storage)
        save_codec(parts.codec, folder, torch.float16, piece_bytes=MOST_BYTES)
        write_voices(folder / "voices", clips, parts.codec, descriptions)
        (folder / "NOTICE.md").write_text(NOTICE)
        (folder / "MODEL_CARD.md").write_text(card(parts, sorted(clips), storage, size_of(folder)))
        for path in folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # some writers create files that only their owner can read
        size = size_of(folder)
        if size > MOST_BYTES:
            raise ValueError(f"{size / 1e6:.2f} MB; at most {MOST_BYTES / 1e6:g} may be shipped:\n{sizes(folder)}")
    return size


def write_language_model(folder: Path, model: DualAR, profile: ModelProfile, storage: Storage) -> None:
    write_json(folder / "config.json", config_document(model.config))
    write_json(folder / "shoal.json", profile_document(profile))
    write_synthetic_tokenizer(folder, model.config)
    halves = {name: tensor.half() for name, tensor in upstream_tensors(model).items()}
    save_file(int8_tensors(model) if storage == "int8" else halves, folder / "model.safetensors")


def write_voices(
    folder: Path, clips: Mapping[str, Sequence[Clip]], codec: Codec, descriptions: Mapping[str, VoiceDescription]
) -> None:
    """Write every voice with recordings, transcripts and codes, in the layout of the voice store."""
    encoder = CodecEncoder(codec)
    store = VoiceStore(folder, sample_rate=codec.config.sample_rate)
    for name, recordings in clips.items():
        content = [(wav_bytes(samples, codec.config.sample_rate), text) for samples, text in recordings]
        store.add_recordings(name, content, descriptions.get(name, NO_DESCRIPTION))
        store.get(name, encoder)  # stores the codes, so that nothing is encoded at start


def read_clips(folder: Path, sample_rate: int) -> dict[str, list[Clip]]:
    """Read what `training.kokoro.voices` wrote: NAME/sample-N.wav and NAME/sample-N.lab."""
    return {
        voice.name: [read_clip(path, sample_rate) for path in sorted(voice.glob("sample-*.wav"))]
        for voice in sorted(folder.iterdir())
        if voice.name in VOICES
    }


def read_clip(path: Path, sample_rate: int) -> Clip:
    """Read a recording and its transcript. Raises ValueError at another sample rate or more than one channel."""
    with wave.open(str(path)) as recording:
        if (recording.getframerate(), recording.getnchannels()) != (sample_rate, 1):
            raise ValueError(f"{path}: not {sample_rate} samples a second in one channel")
        samples = np.frombuffer(recording.readframes(recording.getnframes()), "<i2")
    return samples, path.with_suffix(".lab").read_text().strip()


def voice_descriptions() -> dict[str, VoiceDescription]:
    return {
        name: VoiceDescription(voice.title, voice.description, voice.gender, voice.accent)
        for name, voice in VOICES.items()
    }


def card(parts: Parts, voices: Sequence[str], storage: Storage, size: int) -> str:
    codec = parts.codec.config
    return CARD.format(
        parameters=sum(weight.numel() for weight in parts.model.parameters()) / 1e6,
        codec_parameters=sum(weight.numel() for weight in parts.codec.parameters()) / 1e6,
        codebooks=codec.num_codebooks,
        frame_rate=codec.frame_rate,
        sample_rate=codec.sample_rate,
        voices=", ".join(voices),
        storage=storage,
        megabytes=size / 1e6,
        figures=FIGURES.read_text(),
        entropies=", ".join(f"{name} {found['score']:.3f}" for name, found in parts.trained.items() if name != "step"),
    )


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sizes(folder: Path) -> str:
    """Return a line per file and folder, the largest first."""
    found = {path.name: size_of(path) if path.is_dir() else path.stat().st_size for path in folder.iterdir()}
    ranked = sorted(found.items(), key=lambda entry: entry[1], reverse=True)
    return "\n".join(f"{size / 1e6:9.3f} MB  {name}" for name, size in ranked)


def check(directory: Path, parts: Parts) -> Checkpoint:
    """Load the exported model as users do. Raises ValueError if its codec decodes codes differently."""
    checkpoint = load_checkpoint(directory, dtype=torch.float32)
    if codec_fingerprint(checkpoint.codec) != parts.about.fingerprint:
        raise ValueError(f"{directory}: the codec is not the one whose codes were learned")
    return checkpoint


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--language", type=Path, required=True, help="folder `best` of training.dual_ar")
    parser.add_argument("--codec", type=Path, required=True, help="folder of the codec whose codes it learned")
    parser.add_argument("--clips", type=Path, required=True, help="folder made by training.kokoro.voices")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument(
        "--storage", choices=("int8", "fp16"), default="int8", help="dtype of the language model's matrices"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    parts = read_parts(options.language, options.codec)
    clips = read_clips(options.clips, parts.codec.config.sample_rate)
    size = export(parts, clips, options.out, storage=options.storage, descriptions=voice_descriptions())
    print(sizes(options.out))
    print(f"{size / 1e6:9.3f} MB  in all, of {MOST_BYTES / 1e6:g}")
    check(options.out, parts)


if __name__ == "__main__":
    main()
