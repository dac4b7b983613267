import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.codec.dac import Codec
from shoal.errors import InvalidRequest
from shoal.speech import SamplingParams
from tests import nano
from training.clips import SHIPPED, Utterance, main, named, overridden, resynthesis
from training.codec import NANO_24K, load_codec, save_codec
from training.data import Line, Samples
from training.evaluate import read_manifest, read_wav

TEXTS = ["One red fox.", "Two blue birds.", "Three green frogs."]
VOICES = list(nano.VOICES[:2])
AT_RATE = ("--sample-rate", str(nano.SAMPLE_RATE))


def hum(frames: int, hertz: float) -> Samples:
    at = np.arange(frames * nano.FRAME_LENGTH) / nano.SAMPLE_RATE
    return np.round(6000 * np.sin(2 * np.pi * hertz * at)).astype(np.int16)


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    folder = tmp_path / "speech"
    folder.mkdir()
    lines, sounds = [], []
    for number, text in enumerate(TEXTS):
        for place, voice in enumerate(VOICES):
            sounds.append(hum(3 + number, 150 + 50 * place))
            lines.append(Line(voice, text, sum(sound.size for sound in sounds[:-1]), sounds[-1].size))
    (folder / "shard-00000.pcm").write_bytes(b"".join(sound.astype("<i2").tobytes() for sound in sounds))
    rows = [{"voice": x.voice, "text": x.text, "offset": x.offset, "samples": x.samples} for x in lines]
    (folder / "shard-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_every_system_says_the_first_sentences_in_every_voice(speech: Path, tmp_path: Path) -> None:
    out = tmp_path / "clips"
    main(["--speech", str(speech), "--out", str(out), "--sentences", "2", *AT_RATE])
    clips = read_manifest(out / "manifest.jsonl")
    said = [(clip.system, clip.voice, clip.text) for clip in clips]
    assert sorted(said) == sorted((s, v, t) for s in ("teacher", "resynthesis") for v in VOICES for t in TEXTS[:2])
    first, rate = read_wav(clips[0].path.read_bytes())
    assert rate == nano.SAMPLE_RATE
    assert (first * 32768).astype(np.int16).tolist() == hum(3, 150).tolist()
    lengths = {clip.path.name: set() for clip in clips}
    for clip in clips:
        lengths[clip.path.name].add(read_wav(clip.path.read_bytes())[0].size)
    assert all(len(found) == 1 for found in lengths.values())


def test_clips_have_the_sample_rate_of_the_speech_and_a_codec_of_another_rate_is_refused(
    speech: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=f"{nano.SAMPLE_RATE} Hz"):
        main(["--speech", str(speech), "--out", str(tmp_path), "--sample-rate", "8000"])
    save_codec(Codec(replace(NANO_24K, decoder_dim=64, encoder_dim=8)), tmp_path / "codec")
    arguments = ["--speech", str(speech), "--out", str(tmp_path), "--sentences", "1", "--sample-rate", "24000"]
    main([*arguments, "--codec", f"new={tmp_path / 'codec'}"])
    clips = read_manifest(tmp_path / "manifest.jsonl")
    assert [clip.system for clip in clips] == ["teacher"] * 2 + ["new"] * 2
    assert {read_wav(clip.path.read_bytes())[1] for clip in clips} == {24_000}


def test_voices_take_turns_over_the_sentences(speech: Path, tmp_path: Path) -> None:
    main(["--speech", str(speech), "--out", str(tmp_path), "--voices", "1", *AT_RATE])
    clips = [clip for clip in read_manifest(tmp_path / "manifest.jsonl") if clip.system == "teacher"]
    assert [(clip.text, clip.voice) for clip in clips] == list(zip(TEXTS, [*VOICES, VOICES[0]], strict=True))


def test_resynthesis_is_what_the_codec_decodes(speech: Path) -> None:
    codec, samples = load_codec(SHIPPED).eval(), hum(4, 150)
    with torch.inference_mode():
        made = codec.decode(codec.encode(torch.from_numpy(samples.astype(np.float32) / 32768)[None]))[0]
    (again,) = resynthesis(codec)([Utterance(samples, TEXTS[0], VOICES[0])])
    assert np.abs(again / 32767 - made.numpy()).max() < 1e-4


def test_a_model_speaks_the_sentences_in_its_voices_of_those_names(speech: Path, tmp_path: Path) -> None:
    def clips(out: str, *more: str) -> dict[str, np.ndarray]:
        options = ["--speech", str(speech), "--out", str(tmp_path / out), "--sentences", "1", *AT_RATE]
        main([*options, "--model", "tts=nano", "--sampling", "max_frames=60", *more])
        said = [clip for clip in read_manifest(tmp_path / out / "manifest.jsonl") if clip.system == "tts"]
        return {clip.voice: read_wav(clip.path.read_bytes())[0] for clip in said}

    once, again, other = clips("once"), clips("again"), clips("other", "--sampling", "seed=7")
    assert set(once) == set(VOICES)
    for voice in VOICES:
        # Who else is in a step decides the rounding of products, so a sample may be one apart.
        assert np.abs(again[voice] - once[voice]).max() <= 1.5 / 32768
        assert other[voice].shape != once[voice].shape or np.abs(other[voice] - once[voice]).max() > 0.01


def test_sentences_of_a_file_take_turns_over_the_voices_beside_the_bundled_recordings(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("\n".join(TEXTS))
    options = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / "clips"), "--sentences", "2", "--voices", "1"]
    main([*options, "--model", "tts=nano", "--sampling", "max_frames=40", *AT_RATE])
    clips = read_manifest(tmp_path / "clips" / "manifest.jsonl")
    assert [(c.voice, c.text) for c in clips if c.system == "tts"] == list(zip(VOICES, TEXTS[:2], strict=True))
    recorded = [clip for clip in clips if clip.system == "teacher"]
    assert {clip.voice for clip in recorded} == set(nano.VOICES)
    assert all(read_wav(clip.path.read_bytes())[1] == nano.SAMPLE_RATE for clip in recorded)


def test_what_is_not_a_system_or_a_choice_is_refused() -> None:
    assert named("wide=build/codec") == ("wide", "build/codec")
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=DIR"):
        named("build/codec")
    assert overridden(SamplingParams(), ["temperature=0.5", "top_k=3"]) == SamplingParams(temperature=0.5, top_k=3)
    with pytest.raises(InvalidRequest, match="sampling has temperature"):
        overridden(SamplingParams(), ["heat=1"])
