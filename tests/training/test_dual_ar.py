"""Training of the language model on a CPU: a tiny model, made-up codes, a handful of steps."""

import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shoal.checkpoint.format.model_config import TokenIds, config_document, read_config
from shoal.checkpoint.load import load_model
from shoal.checkpoint.random import fill_random
from shoal.model.cache import NoKVCache
from shoal.model.dual_ar import DualAR
from shoal.model.family import S1
from shoal.model.generate import generate
from shoal.model.slow import Head
from shoal.speech import FinishReason, SamplingParams
from shoal.text.prompt import InterleavePrompts, Reference, join
from shoal.text.tokenizer import STOP
from tests.training.conftest import BOOKS, CONFIG, CPU, SIZE, library_of, tiny_codec
from training.codec import encode_latent, save_codec
from training.data import Corpus, Line, Samples
from training.dual_ar import Plan, Run, Trainer, main, save_language_model, split_weights
from training.encode import (
    About,
    FixedShapeEncoder,
    batches,
    encode_new,
    encode_recordings,
    frozen_codec,
    prompts_for,
    spoken_text,
)
from training.encode import main as encode_main
from training.int8 import int8_rounded
from training.language import (
    SHAPES,
    cross_entropies,
    hidden_states,
    initialise,
    is_predicted,
    model_config,
    residual_logits,
)
from training.means import Diverged
from training.muon import Muon, orthogonalise
from training.packing import SEMANTIC_BEGIN, STOP_ID, EncodedShard, Library, Packer, corrupt, lower, utterance_columns

pytestmark = pytest.mark.usefixtures("one_seed")

ABOUT_TINY = About(BOOKS, SIZE, 640, 16_000, "0123456789abcdef")
PLAN = Plan(
    CONFIG,
    minutes=600.0,
    rows=2,
    length=96,
    residual_frames=48,
    warm_up=4,
    validation_rows=2,
    ema=0.5,
    least_hours=0.0,
    recoveries=0,
)


@pytest.fixture(scope="module")
def prompts() -> InterleavePrompts:
    return prompts_for(ABOUT_TINY)


def made_up_codes(frames: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, SIZE, (BOOKS, frames)).astype(np.int32)


SAID = [
    ("ann", "Hello there.", made_up_codes(9, 0)),
    ("bob", "Good morning, Bob.", made_up_codes(14, 1)),
    ("ann", "How are you?", made_up_codes(7, 2)),
    ("bob", "Fine", made_up_codes(5, 3)),
    ("ann", "A third one.", made_up_codes(11, 4)),
]


def write_codes(folder: Path, prompts: InterleavePrompts, said: list[tuple[str, str, NDArray[np.int32]]]) -> Path:
    ABOUT_TINY.write(folder)
    columns = [utterance_columns(prompts, text, codes) for _, text, codes in said]
    shard = EncodedShard.of(columns, [voice for voice, _, _ in said], [text for _, text, _ in said], BOOKS)
    shard.write(folder / f"shard-{len(list(folder.glob('*.npz'))):05d}.npz")
    return folder


@pytest.fixture
def codes(tmp_path: Path, prompts: InterleavePrompts) -> Path:
    return write_codes(tmp_path / "codes", prompts, SAID)


def trainer_for(codes: Path, plan: Plan = PLAN) -> Trainer:
    return Trainer(plan, library_of(codes), library_of(codes), CPU)


def run_for(trainer: Trainer, out: Path, steps: int) -> Run:
    out.mkdir(exist_ok=True)
    trainer.plan = replace(trainer.plan, max_steps=steps)
    return Run(trainer, out, began=time.monotonic(), about=ABOUT_TINY, log_every=2, sync_every=1)


# Rows.


def test_a_row_is_what_the_engine_would_send_with_the_earlier_utterances_as_references(
    codes: Path, prompts: InterleavePrompts
) -> None:
    library = library_of(codes)
    by_text = {text: (voice, each) for voice, text, each in SAID}
    rows = Packer(library, rows=6, length=150, seed=1).draw()
    for positions in rows.positions:
        row = library.columns[torch.from_numpy(positions)].numpy().T
        references: list[Reference] = []
        voices = set()
        rest = row[:, len(prompts.prompt("")[0]) :]  # every text is looked for where the one before it ended
        while rest.shape[1]:
            said = next((text for text in by_text if _begins(rest, prompts, text)), None)
            if said is None:
                break  # cut within the text
            voice, each = by_text[said]
            voices.add(voice)
            whole = join([prompts.prompt(said, references), prompts.grid.frames(each), prompts.grid.control(STOP)])
            shown = min(whole.shape[1], row.shape[1])
            assert (row[:, :shown] == whole[:, :shown]).all()
            references.append(Reference(said, each))
            rest = row[:, whole.shape[1] + 13 :]
        assert len(voices) == 1
        assert len(references) > 1


def _begins(rest: NDArray[np.int16], prompts: InterleavePrompts, text: str) -> bool:
    ids = prompts.grid.text(text)[0]
    follows_audio = rest.shape[1] > len(ids) and rest[0, len(ids)] >= SEMANTIC_BEGIN
    return bool(follows_audio and (rest[0, : len(ids)] == ids).all())


def test_each_utterance_of_a_voice_comes_once_before_any_comes_again(codes: Path) -> None:
    packer = Packer(library_of(codes), rows=1, length=10)
    for voice, count in (("ann", 3), ("bob", 2)):
        for _ in range(3):
            assert len({packer._next(voice) for _ in range(count)}) == count


def test_no_utterance_comes_twice_behind_one_opening_token(codes: Path) -> None:
    library = library_of(codes)
    for positions in Packer(library, rows=20, length=400, seed=2).draw().positions:
        opened = np.flatnonzero(positions == 0)
        assert opened[0] == 0
        assert len(opened) > 1
        for part in np.split(positions, opened[1:]):
            assert len(set(part)) == len(part)
            voices = {library.voices[np.searchsorted(library.starts, place, "right") - 1] for place in part[1:]}
            assert len(voices) <= 1


def test_a_voice_is_drawn_as_often_as_it_has_utterances(codes: Path) -> None:
    library = library_of(codes)
    first = Packer(library, rows=2000, length=3).draw().positions[:, 1]
    voices = [library.voices[np.searchsorted(library.starts, place, "right") - 1] for place in first]
    assert voices.count("ann") / 2000 == pytest.approx(3 / 5, abs=0.05)


def test_utterances_that_arrive_are_mixed_into_those_that_wait(codes: Path, prompts: InterleavePrompts) -> None:
    library = library_of(codes)
    packer = Packer(library, rows=1, length=10)
    packer._next("ann")
    write_codes(codes, prompts, [("ann", "News.", made_up_codes(4, 9))])
    assert library.refresh() == 1
    drawn = [packer._next("ann") for _ in range(3)]
    assert 5 in drawn
    assert len(set(drawn)) == 3


def test_a_full_library_takes_no_more(codes: Path) -> None:
    library = Library(codes, BOOKS, 20, CPU)
    assert library.refresh() == 0


def test_only_frames_and_the_stops_behind_them_are_predicted(codes: Path, prompts: InterleavePrompts) -> None:
    columns = utterance_columns(prompts, SAID[0][1], SAID[0][2])
    text = len("<|speaker:0|>") + len(SAID[0][1])
    wanted = is_predicted(torch.from_numpy(columns[:, 0]))
    assert wanted.tolist() == [False] * text + [True] * (9 + 1)
    assert columns[-1, 0] == STOP_ID
    assert (columns[text:-1, 0] - SEMANTIC_BEGIN == SAID[0][2][0]).all()
    assert (columns[text:-1, 1:] == SAID[0][2].T).all()


def test_lower_case_changes_letters_only(prompts: InterleavePrompts) -> None:
    columns = torch.from_numpy(utterance_columns(prompts, "Hi BOB, 2!", SAID[0][2])).long()
    there = torch.ones(len(columns), dtype=torch.bool)
    assert torch.equal(lower(columns, ~there), columns)
    wanted = torch.from_numpy(utterance_columns(prompts, "hi bob, 2!", SAID[0][2])).long()
    assert torch.equal(lower(columns, there), wanted)


def test_corruption_touches_audio_only_and_keeps_token_and_first_code_together(prompts: InterleavePrompts) -> None:
    columns = torch.from_numpy(utterance_columns(prompts, "Hello there.", made_up_codes(4000, 5))).long()
    assert torch.equal(corrupt(columns, SIZE, 0.0, 0.0), columns)
    noisy = corrupt(columns, SIZE, 0.1, 0.2)
    audio = columns[:, 0] >= SEMANTIC_BEGIN
    assert torch.equal(noisy[~audio], columns[~audio])
    assert torch.equal(noisy[audio, 0] - SEMANTIC_BEGIN, noisy[audio, 1])
    changed = (noisy != columns)[audio].float().mean(0)
    assert 0.07 < changed[1] < 0.13
    assert 0.24 < changed[2] < 0.31


# The model in training form.


def test_training_computes_what_inference_computes(codes: Path) -> None:
    model = DualAR(CONFIG)
    fill_random(model, torch.float32, "cpu", torch.Generator().manual_seed(1))
    columns = library_of(codes).columns[torch.arange(96).view(2, 48)].long()
    positions = torch.arange(48).repeat(2)
    expected = model.slow(columns.flatten(0, 1), positions, NoKVCache(2))
    assert torch.allclose(hidden_states(model, columns), expected, atol=1e-4)
    frames = torch.randint(SIZE, (7, BOOKS))
    hidden = torch.randn(7, CONFIG.slow.dim)
    wanted = model.fast.teacher_forced(hidden, frames)[:, 1:]
    assert torch.allclose(residual_logits(model.fast, hidden, frames), wanted, atol=1e-5)


def test_before_training_every_token_is_equally_likely(codes: Path) -> None:
    model = DualAR(CONFIG)
    initialise(model)
    found = cross_entropies(model, library_of(codes).columns[:100][None].long())
    assert found["semantic"] == pytest.approx(math.log(CONFIG.vocab_size), abs=1e-3)
    assert found["residual"] == pytest.approx([math.log(SIZE)] * 2, abs=1e-3)


def test_the_configuration_survives_its_file() -> None:
    tokens = TokenIds(SEMANTIC_BEGIN, SEMANTIC_BEGIN + SIZE - 1, STOP_ID, S1)
    assert read_config(config_document(CONFIG), tokens) == CONFIG
    nano = model_config(SHAPES["nano"], 10, 1024)
    assert read_config(config_document(nano), TokenIds(271, 1294, 260, S1)) == nano


def test_muon_is_for_the_matrices_inside_the_layers() -> None:
    model = DualAR(CONFIG)
    matrices, others = split_weights(model)
    assert len(matrices) == 4 * (2 + 1)
    assert len(matrices) + len(others) == len(list(model.parameters()))
    found = torch.linalg.svdvals(orthogonalise(torch.randn(3, 24, 48), torch.float32))
    assert found.min() > 0.5
    assert found.max() < 1.3


def test_muon_goes_downhill() -> None:
    wanted = torch.randn(6, 4)
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    optimizer = Muon([weight], lr=0.05)
    for _ in range(120):
        optimizer.zero_grad()
        (weight - wanted).square().sum().backward()
        optimizer.step()
    assert (weight - wanted).abs().max() < 0.2


# Runs.


def test_a_memorised_utterance_is_spoken_again_to_its_stop(
    tmp_path: Path, codes: Path, prompts: InterleavePrompts
) -> None:
    """Training, files and inference agree, from the prompt to the last code."""
    plan = replace(PLAN, dropout=0.0, lowered=0.0, wrong_frames=0.0, wrong_codes=0.0, rows=4, length=64, ema=0.0)
    trainer = trainer_for(codes, plan)
    before = trainer.validate()
    run_for(trainer, tmp_path / "out", 160).go()
    after = json.loads((tmp_path / "out" / "best" / "trained.json").read_text())["fp32"]
    assert after["score"] < 0.2 * before["score"]
    model = load_model(tmp_path / "out" / "best", prompts.grid.tokenizer, dtype=torch.float32)
    # Rows are cut at their end, so only what stands early in some row was learned to its stop.
    for text, wanted in ((SAID[0][1], SAID[0][2]), (SAID[2][1], SAID[2][2])):
        prompt = torch.from_numpy(prompts.prompt(text))
        spoken = generate(
            model, Head(model.slow), prompt, SamplingParams(top_k=1, repetition_penalty=1.0, max_frames=40)
        )
        assert spoken.finish is FinishReason.STOP
        assert (spoken.codes.numpy() == wanted).all()


def test_a_run_that_is_resumed_ends_where_an_unbroken_one_does(tmp_path: Path, codes: Path) -> None:
    whole = trainer_for(codes)
    run_for(whole, tmp_path / "whole", 8).go()
    first = trainer_for(codes)
    run_for(first, tmp_path / "parts", 4).go()
    second = trainer_for(codes, replace(PLAN, seed=9))
    second.load(torch.load(tmp_path / "parts" / "state.pt", weights_only=True))
    run_for(second, tmp_path / "parts", 8).go()
    assert second.pace.step == 8
    for name, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name


def test_a_run_that_diverges_stops_and_leaves_the_last_good_checkpoint(tmp_path: Path, codes: Path) -> None:
    trainer = trainer_for(codes)
    run_for(trainer, tmp_path / "out", 2).go()
    good = (tmp_path / "out" / "state.pt").read_bytes()
    with torch.no_grad():
        trainer.model.slow.norm.weight.fill_(torch.nan)
    with pytest.raises(Diverged):
        run_for(trainer, tmp_path / "out", 6).go()
    assert (tmp_path / "out" / "state.pt").read_bytes() == good
    assert (tmp_path / "out" / "best" / "config.json").exists()


def test_a_run_that_diverges_goes_back_once_it_may(tmp_path: Path, codes: Path) -> None:
    trainer = trainer_for(codes, replace(PLAN, recoveries=1))
    run_for(trainer, tmp_path / "out", 2).go()
    with torch.no_grad():
        trainer.model.slow.norm.weight.fill_(torch.nan)
    run_for(trainer, tmp_path / "out", 6).go()
    assert trainer.pace.step == 6
    assert trainer.pace.rate_scale == 0.5
    assert all(bool(weight.isfinite().all()) for weight in trainer.model.parameters())


def test_rates_warm_up_stay_and_fall(tmp_path: Path, codes: Path) -> None:
    trainer = trainer_for(codes, replace(PLAN, minutes=(100 + 20) / 60, warm_up=10))
    run = run_for(trainer, tmp_path, 1)
    trainer.pace.began_share = 0.0
    found = []
    for step, seconds in ((0, 0), (20, 40), (20, 75), (20, 100)):
        trainer.pace.step, run.began = step, time.monotonic() - seconds
        run.set_rate()
        found.append(trainer.optimizers["others"].param_groups[0]["lr"] / trainer.plan.rate)
    assert found == pytest.approx([0.1, 1.0, 0.5, 0.02], abs=0.01)


def test_int8_weights_predict_almost_as_well(tmp_path: Path, codes: Path) -> None:
    trainer = trainer_for(codes)
    run_for(trainer, tmp_path / "out", 30).go()
    found = json.loads((tmp_path / "out" / "best" / "trained.json").read_text())
    assert found["int8"]["score"] == pytest.approx(found["fp32"]["score"], abs=0.02)
    rounded = int8_rounded(trainer.ema)
    weight, kept = trainer.ema.slow.embeddings.weight, rounded.slow.embeddings.weight
    assert ((weight - kept).abs() <= weight.abs().amax(1, keepdim=True) / 127 * 0.51).all()


def test_the_files_of_a_model_are_small_enough_to_carry_and_load_again(
    tmp_path: Path, prompts: InterleavePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.dual_ar.files.PIECE_BYTES", 40_000)
    model = DualAR(CONFIG)
    save_language_model(tmp_path / "model", model, ABOUT_TINY, {"step": 1})
    pieces = list((tmp_path / "model").glob("*.safetensors"))
    assert len(pieces) > 1
    assert max(piece.stat().st_size for piece in pieces) < 45_000
    again = load_model(tmp_path / "model", prompts.grid.tokenizer, dtype=torch.float32)
    assert torch.allclose(again.fast.output.weight, model.fast.output.weight, atol=1e-3)


def test_the_command_trains_and_leaves_log_checkpoint_and_model(tmp_path: Path, codes: Path) -> None:
    out = tmp_path / "out"
    command = ["--codes", str(codes), "--heldout-codes", str(codes), "--out", str(out), "--shape", "tiny", "--plain"]
    command += ["--rows", "2", "--length", "64", "--residual-frames", "40", "--validation-rows", "2"]
    command += ["--least-hours", "0", "--hours", "0.1"]
    main([*command, "--max-steps", "3"])
    assert {path.name for path in out.iterdir()} == {"best", "log.jsonl", "state.pt"}
    main([*command, "--max-steps", "5", "--resume"])
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "validation" in line] == [3, 5]
    assert {"fp32", "int8"} <= set(lines[-1]["storage"])
    main([*command, "--max-steps", "1", "--start", str(out / "best"), "--out", str(tmp_path / "further")])
    assert (tmp_path / "further" / "best").is_dir()


def test_a_deeper_model_begins_where_the_trained_one_ended(codes: Path) -> None:
    trained = DualAR(CONFIG)
    fill_random(trained, torch.float32, "cpu", torch.Generator().manual_seed(4))
    deeper = replace(CONFIG, fast=replace(CONFIG.fast, n_layer=CONFIG.fast.n_layer + 1))
    trainer = trainer_for(codes, replace(PLAN, config=deeper))
    trainer.begin_with(trained)
    assert trainer.validate() == trainer.validate(trained.eval())
    narrower = replace(CONFIG, slow=replace(CONFIG.slow, n_layer=CONFIG.slow.n_layer - 1))
    with pytest.raises(ValueError, match="another shape"):
        trainer_for(codes, replace(PLAN, config=narrower)).begin_with(trained)


# Codes from sound.


def hum(frames: int, seed: int) -> Samples:
    at = np.arange(frames * 640) / 16_000
    wave = np.sin(2 * np.pi * (100 + 40 * seed) * at) * (1 + np.sin(2 * np.pi * 2 * at))
    return np.asarray(6000 * wave, np.int16)


@pytest.fixture
def codec_folder(tmp_path: Path) -> Path:
    """One codebook more than is used: the last is cut away."""
    save_codec(tiny_codec(BOOKS + 1), tmp_path / "codec")
    return tmp_path / "codec"


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    folder = tmp_path / "speech"
    folder.mkdir()
    recordings = [hum(5, 0), hum(9, 1), hum(3, 2)]
    offsets = np.cumsum([0, *map(len, recordings)])
    lines = [
        {"voice": "ann", "text": f"Word {word}.", "offset": int(offset), "samples": len(samples)}
        for word, offset, samples in zip(("one", "two", "three"), offsets, recordings, strict=False)
    ]
    (folder / "shard-00000.pcm").write_bytes(np.concatenate(recordings).astype("<i2").tobytes())
    (folder / "shard-00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_codes_do_not_depend_on_what_is_encoded_beside(codec_folder: Path) -> None:
    codec = frozen_codec(codec_folder, BOOKS)
    recordings = [hum(5, 0), hum(9, 1), hum(3, 2)]
    together = encode_recordings(codec, recordings, most=27)
    for samples, found in zip(recordings, together, strict=True):
        alone = codec.encode(torch.from_numpy(samples.astype(np.float32))[None] / 32768)[0].numpy()
        assert found.shape == (BOOKS, len(samples) // 640)
        assert (found == alone).all()


def test_batches_hold_every_recording_once_within_the_bound() -> None:
    frames = [3, 50, 7, 7, 20, 90, 1]
    made = list(batches(frames, 60))
    assert sorted(index for batch in made for index in batch) == list(range(7))
    assert all(len(batch) == 1 or len(batch) * max(frames[i] for i in batch) <= 60 for batch in made)


def test_fixed_shapes_give_the_same_codes(codec_folder: Path) -> None:
    codec = frozen_codec(codec_folder)
    recordings = [
        hum(frames, number)[: 640 * frames - 30 * number] for number, frames in enumerate((3, 9, 4, 5, 20, 4))
    ]
    fixed = FixedShapeEncoder(codec, lambda *given: encode_latent(*given), shapes=(4, 10))
    for found, wanted in zip(fixed(recordings), encode_recordings(codec, recordings), strict=True):
        assert (found == wanted).all()


def test_the_codec_is_used_as_it_is_shipped(codec_folder: Path) -> None:
    codec = frozen_codec(codec_folder, BOOKS)
    assert codec.config.num_codebooks == BOOKS
    for weight in codec.parameters():
        assert torch.equal(weight, weight.half().float())


def test_speech_becomes_shards_of_columns_once(
    codec_folder: Path, speech: Path, tmp_path: Path, prompts: InterleavePrompts
) -> None:
    out = tmp_path / "encoded"
    command = ["--shards", str(speech), str(out), "--codec", str(codec_folder), "--codebooks", str(BOOKS), "--discard"]
    encode_main(command)
    shard = EncodedShard.read(out / "shard-00000.npz")
    assert shard.voices == ["ann"] * 3
    codec = frozen_codec(codec_folder, BOOKS)
    found = encode_recordings(codec, [hum(5, 0)])[0]
    assert (shard.columns[: shard.lengths[0]] == utterance_columns(prompts, shard.texts[0], found)).all()
    assert (speech / "shard-00000.pcm").stat().st_size == 2
    assert len(Corpus(speech)) == 3
    assert encode_new(partial(encode_recordings, codec), prompts, speech, out, discard=False) == 0
    with pytest.raises(ValueError, match="speak it again"):
        encode_new(partial(encode_recordings, codec), prompts, speech, tmp_path, discard=False)
    assert About.read(out) == About.of(codec)
    with pytest.raises(ValueError, match="another codec"):
        replace(ABOUT_TINY, codebooks=2).write(out)


def test_text_is_what_the_engine_would_say_and_sometimes_open_ended() -> None:
    texts = [spoken_text(Line("ann", f'Mr. Smith said "{word}".', 0, 0)) for word in map(str, range(300))]
    assert all(text and text.startswith("Mister Smith said") and '"' not in text for text in texts)
    share = sum(not text.endswith(".") for text in texts if text) / 300
    assert 0.04 < share < 0.18
    assert spoken_text(Line("ann", "...", 0, 0)) is None
