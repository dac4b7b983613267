"""Export of a tiny model to the shipped directory, loaded again as any model."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.checkpoint.load import load_checkpoint
from shoal.checkpoint.random import fill_random
from shoal.checkpoint.save import upstream_tensors
from shoal.config import EngineConfig
from shoal.model.dual_ar import DualAR
from shoal.speech import FinishReason, SamplingParams
from shoal.voices.description import VoiceDescription
from shoal.voices.encoder import CodecEncoder
from shoal.voices.store import VoiceStore
from tests.training.conftest import BOOKS, CONFIG, CPU, SIZE, library_of, tiny_codec
from training.codec import save_codec
from training.data import Samples
from training.dual_ar import Plan, Run, Trainer, save_language_model
from training.encode import About, encode_recordings, frozen_codec, prompts_for
from training.export import PROFILE, Parts, check, export, read_parts, size_of
from training.int8 import dequantize, int8_rounded
from training.language import hidden_states
from training.packing import EncodedShard, utterance_columns

TEXT = "Hello there."
NO_GUARD = EngineConfig(slots=2, guard=False)


def hum(frames: int, pitch: float) -> Samples:
    at = np.arange(frames * 640) / 16_000
    glide = np.sin(2 * np.pi * (pitch * at + 30 * at**2)) * (1 + np.sin(2 * np.pi * 3 * at))
    return np.asarray(6000 * glide, np.int16)


CLIPS = {"ann": [(hum(40, 120), "One reference."), (hum(30, 140), "Another one.")], "bob": [(hum(35, 90), "His own.")]}


@pytest.fixture
def parts(tmp_path: Path, codec_folder: Path) -> Parts:
    """An untrained model, saved and read as a trained one."""
    about = About.of(frozen_codec(codec_folder))
    model = DualAR(CONFIG)
    fill_random(model, torch.float32, "cpu", torch.Generator().manual_seed(4))
    save_language_model(tmp_path / "language", model, about, {"step": 7})
    return read_parts(tmp_path / "language", codec_folder)


def test_what_was_trained_is_what_the_shipped_directory_says(tmp_path: Path, codec_folder: Path) -> None:
    """From a recording through training and export to the engine: the same codes come out, to the stop."""
    codec = frozen_codec(codec_folder)
    about, prompts = About.of(codec), prompts_for(About.of(codec))
    sound = hum(11, 150)
    codes = encode_recordings(codec, [sound])[0]
    (tmp_path / "codes").mkdir()
    columns = utterance_columns(prompts, TEXT, codes)
    EncodedShard.of([columns], ["ann"], [TEXT], BOOKS).write(tmp_path / "codes" / "shard-00000.npz")
    library = library_of(tmp_path / "codes")
    plan = Plan(
        CONFIG, minutes=600, rows=2, length=len(columns), residual_frames=40,
        warm_up=4, dropout=0.0, lowered=0.0, wrong_frames=0.0, wrong_codes=0.0, ema=0.0, validation_rows=1,
        max_steps=90,
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    Run(Trainer(plan, library, library, CPU), tmp_path / "run", began=time.monotonic(), about=about).go()
    export(read_parts(tmp_path / "run" / "best", codec_folder), CLIPS, tmp_path / "nano", storage="fp16")
    greedy = SamplingParams(top_k=1, repetition_penalty=1.0, max_frames=30)
    with shoal.load(str(tmp_path / "nano"), voices=tmp_path / "own", config=NO_GUARD) as engine:
        speech = engine.speak(TEXT, sampling=greedy)
    assert speech.finish is FinishReason.STOP
    assert (speech.codes == codes).all()
    assert speech.sample_rate == 16_000
    assert len(speech.samples) == 11 * 640


def test_the_directory_speaks_with_its_voices(tmp_path: Path, parts: Parts) -> None:
    size = export(parts, CLIPS, tmp_path / "nano", storage="fp16")
    assert size == size_of(tmp_path / "nano")
    assert check(tmp_path / "nano", parts).profile == replace(PROFILE, voice=None)
    few = replace(PROFILE.sampling, max_frames=6)
    with shoal.load(str(tmp_path / "nano"), voices=tmp_path / "own", config=NO_GUARD) as engine:
        for voice in CLIPS:
            assert len(engine.speak(TEXT, voice=voice, sampling=few).samples) > 0


def test_voices_bring_their_codes_along(tmp_path: Path, parts: Parts) -> None:
    export(parts, CLIPS, tmp_path / "nano", storage="fp16")
    without_encoder = load_checkpoint(tmp_path / "nano", dtype=torch.float32, encoder=False).codec
    store = VoiceStore(tmp_path / "own", [tmp_path / "nano" / "voices"], sample_rate=16_000)
    assert store.names() == ["ann", "bob"]
    voice = store.get("ann", CodecEncoder(without_encoder))
    assert [reference.text for reference in voice.references] == ["One reference.", "Another one."]
    wanted = encode_recordings(parts.codec, [CLIPS["ann"][0][0]])[0]
    # Resampling to the same rate passes samples on, so the codes are those of the corpus.
    assert (voice.references[0].codes == wanted).all()


def test_int8_files_hold_every_matrix_by_rows(tmp_path: Path, parts: Parts) -> None:
    export(parts, CLIPS, tmp_path / "nano", storage="int8")
    stored = load_file(tmp_path / "nano" / "model.safetensors")
    wanted = upstream_tensors(int8_rounded(parts.model))
    for name, tensor in wanted.items():
        if tensor.dim() == 2:
            assert stored[name].dtype == torch.int8
            scales = stored[name.replace(".weight", ".scales")]
            assert torch.allclose(dequantize(stored[name], scales), tensor, atol=1e-6)
        else:
            assert torch.equal(stored[name].float(), tensor.half().float())
    assert (tmp_path / "nano" / "model.safetensors").stat().st_size < 0.6 * 2 * sum(t.numel() for t in wanted.values())


def test_an_int8_directory_computes_what_its_rounded_weights_do(tmp_path: Path, parts: Parts) -> None:
    export(parts, CLIPS, tmp_path / "nano", storage="int8")
    columns = torch.randint(SIZE, (1, 20, 1 + BOOKS))
    columns[..., 0] += parts.model.config.semantic_begin_id
    model = check(tmp_path / "nano", parts).model
    wanted = hidden_states(int8_rounded(parts.model), columns)
    assert torch.allclose(hidden_states(model, columns), wanted, atol=1e-3)
    with shoal.load(str(tmp_path / "nano"), voices=tmp_path / "own", config=NO_GUARD) as engine:
        engine.speak(TEXT, voice="ann", sampling=replace(PROFILE.sampling, max_frames=4))


def test_a_directory_that_is_too_large_is_not_made(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.export.MOST_BYTES", 100_000)
    with pytest.raises(ValueError, match="codec"):
        export(parts, CLIPS, tmp_path / "nano", storage="fp16")
    assert not (tmp_path / "nano").exists()


def test_a_model_of_another_codec_is_refused(tmp_path: Path, parts: Parts) -> None:
    save_codec(tiny_codec(seed=5), tmp_path / "other")
    with pytest.raises(ValueError, match="another codec"):
        read_parts(tmp_path / "language", tmp_path / "other")


def test_the_card_and_notices_are_there(tmp_path: Path, parts: Parts) -> None:
    export(
        parts, CLIPS, tmp_path / "nano", storage="int8", descriptions={"ann": VoiceDescription("Ann", gender="female")}
    )
    assert "ann, bob" in (tmp_path / "nano" / "MODEL_CARD.md").read_text()
    assert "Kokoro-82M" in (tmp_path / "nano" / "NOTICE.md").read_text()
    assert json.loads((tmp_path / "nano" / "voices" / "ann" / "description.json").read_text())["title"] == "Ann"
    assert json.loads((tmp_path / "nano" / "shoal.json").read_text())["normalize"] is True
