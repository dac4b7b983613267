"""Codes that the language model samples, and a decoder that learns from them."""

import json
import random
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.checkpoint.random import fill_random
from shoal.model.dual_ar import DualAR
from shoal.voices.encoder import codec_fingerprint
from tests.training.conftest import BOOKS, CONFIG, SIZE
from training.codec import load_codec
from training.codec.command import main as train_codec
from training.codec.quantiser import look_up
from training.data import Line
from training.dual_ar import save_language_model
from training.encode import About, encode_new, encode_recordings, frozen_codec, prompts_for
from training.packing import STOP_ID, EncodedShard, utterance_columns
from training.resample import main, rows_with_references, sample_residuals
from training.sampled import SampledShard


@pytest.fixture
def model() -> DualAR:
    model = DualAR(CONFIG)
    fill_random(model, torch.float32, "cpu", torch.Generator().manual_seed(4))
    return model.eval()


def write_speech(folder: Path, shard: int, seconds: list[float]) -> None:
    folder.mkdir(exist_ok=True)
    rng, sounds, lines = np.random.default_rng(shard), [], []
    for number, length in enumerate(seconds):
        # Not a whole number of frames, as the teacher's utterances are.
        sounds.append((2000 * rng.standard_normal(int(length * 16_000) + 200)).astype("<i2"))
        line = Line(f"voice{number % 2}", f"Sentence {number}.", sum(map(len, sounds[:-1])), len(sounds[-1]))
        lines.append(json.dumps(asdict(line)))
    stem = folder / f"shard-{shard:05d}"
    stem.with_suffix(".pcm").write_bytes(b"".join(sound.tobytes() for sound in sounds))
    stem.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")


def test_only_codes_behind_the_first_are_sampled_and_only_of_audio(model: DualAR, codec_folder: Path) -> None:
    prompts = prompts_for(About.of(frozen_codec(codec_folder)))
    codes = np.random.default_rng(1).integers(SIZE, size=(BOOKS, 30)).astype(np.int32)
    columns = torch.from_numpy(utterance_columns(prompts, "Hello there.", codes).astype(np.int64))[None]
    torch.manual_seed(0)
    made = sample_residuals(model, columns, temperature=1.0, top_p=1.0)
    audio = columns[0, :, 0] >= CONFIG.semantic_begin_id
    assert torch.equal(made[..., :2], columns[..., :2])
    assert torch.equal(made[0, ~audio], columns[0, ~audio])
    assert (made[0, audio, 2:] != columns[0, audio, 2:]).float().mean() > 0.5
    assert made[0, -1, 0] == STOP_ID


def test_rows_begin_with_other_utterances_of_the_voice(codec_folder: Path) -> None:
    prompts = prompts_for(About.of(frozen_codec(codec_folder)))
    columns = [utterance_columns(prompts, "Hi.", np.full((BOOKS, 3 + n), n, np.int32)) for n in range(4)]
    shard = EncodedShard.of(columns, ["a", "b", "a", "a"], ["Hi."] * 4, BOOKS, [0, 1, 2, 3])
    rows = rows_with_references(shard, random.Random(0))
    assert all((row[-len(own) :] == own).all() for row, own in zip(rows, columns, strict=True))
    assert len(rows[1]) == 1 + len(columns[1])  # no other of this voice
    assert any(len(row) > 1 + len(own) for row, own in zip(rows, columns, strict=True))


def test_a_decoder_learns_from_sampled_codes_and_its_codes_keep_their_meaning(
    model: DualAR, codec_folder: Path, tmp_path: Path
) -> None:
    speech, codes = tmp_path / "speech", tmp_path / "codes"
    for shard, seconds in enumerate(([1.0], [1.2, 0.3, 0.9, 5.0])):
        write_speech(speech, shard, seconds)
    codec = frozen_codec(codec_folder)
    codes.mkdir()
    encode_new(partial(encode_recordings, codec), prompts_for(About.of(codec)), speech, codes, discard=False)
    save_language_model(tmp_path / "lm", model, About.of(codec), {"step": 1})
    main(["--language", str(tmp_path / "lm"), "--codes", str(codes), "--out", str(tmp_path / "sampled")])
    shard = SampledShard.read(tmp_path / "sampled" / "shard-00001.npz")
    assert shard.frames.tolist() == [30, 7, 22, 125]
    assert (shard.true[:, 0] == shard.sampled[:, 0]).all()
    assert (shard.true != shard.sampled).any()
    options = ["--corpus", str(speech), "--out", str(tmp_path / "out"), "--start", str(codec_folder), "--freeze-codes"]
    options += ["--sampled", str(tmp_path / "sampled"), "--depth", str(BOOKS), "--plain", "--decoded-frames", "4"]
    train_codec([*options, "--batch", "1", "--frames", "8", "--hours", "0.01", "--max-steps", "2", "--minutes", "5"])
    before, after = load_codec(codec_folder), load_codec(tmp_path / "out")
    assert not torch.equal(before.decoder.model[0].conv.weight, after.decoder.model[0].conv.weight)
    assert codec_fingerprint(before) == codec_fingerprint(after)


def test_latents_of_codes_are_those_of_the_codec(codec_folder: Path) -> None:
    codec = load_codec(codec_folder)
    codes = torch.randint(SIZE, (2, BOOKS, 5))
    assert torch.allclose(
        look_up(codec, codes.transpose(1, 2)).transpose(1, 2), codec.quantizer.lookup(codes), atol=1e-5
    )
