"""Codec training on a CPU: a tiny codec, a made-up corpus, a handful of steps."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.codec.config import CodecConfig, WindowTransformerConfig
from shoal.codec.dac import Codec
from shoal.codec.streaming import NoPast, StreamingDecoder
from shoal.voices.encoder import codec_fingerprint
from tests.training.conftest import CPU
from training.codec import (
    Mode,
    Plan,
    Reel,
    Run,
    Trainer,
    codebooks,
    decode_latent,
    encode_latent,
    initialise,
    keep_codebooks,
    lay_out_codebooks,
    load_codec,
    main,
    make_plan,
    parse_arguments,
    perplexities,
    prepare,
    quantise,
    revive,
    save_codec,
)
from training.codec.augment import augment
from training.codec.reel import PHONEMES_PER_SECOND, UNKNOWN
from training.codec.run import load_companions, save_companions
from training.codec.trainer import phoneme_loss
from training.codec_losses import MelLoss
from training.discriminators import Discriminators, TimeConv
from training.means import Diverged

pytestmark = pytest.mark.usefixtures("one_seed")

TINY = CodecConfig(
    sample_rate=16_000,
    encoder_dim=8,
    encoder_rates=(2, 4, 4, 5),
    latent_dim=32,
    decoder_dim=64,
    decoder_rates=(5, 4, 4, 2),
    encoder_transformer_layers=(0, 0, 0, 0),
    downsample_factor=(2, 2),
    semantic_codebook_size=32,
    codebook_size=32,
    n_codebooks=2,
    codebook_dim=8,
    transformer=WindowTransformerConfig(n_layer=1, n_head=2, dim=32, intermediate_size=64, head_dim=16, window_size=4),
)
PLAN = Plan(
    config=TINY,
    minutes=60.0,
    batch=2,
    frames=8,
    rate=2e-3,
    warm_up=5,
    free_steps=6,
    layout_frames=256,
    adversary_from=2.0,
    adversary_ramp=2,
    revive_every=4,
    ema=0.8,
    discriminator_width=8,
    recoveries=0,
    depths=(3, 3, 2, 1),
)


def babble(seconds: float, seed: int) -> Tensor:
    """Something like speech: a gliding voice that comes and goes."""
    generator = torch.Generator().manual_seed(seed)
    at = torch.arange(int(seconds * 16_000)) / 16_000
    pitch = 120 + 60 * torch.sin(2 * torch.pi * 0.7 * at + seed)
    phase = 2 * torch.pi * torch.cumsum(pitch, 0) / 16_000
    voice = sum(torch.sin(k * phase) / k for k in range(1, 12)) * (1 + torch.sin(2 * torch.pi * 3 * at))
    return 0.1 * voice + 0.01 * torch.randn(len(at), generator=generator)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for shard in range(3):
        sound = (babble(6.4, shard) * 32767).clamp(-32768, 32767).to(torch.int16)
        (folder / f"shard-{shard:05d}.pcm").write_bytes(sound.numpy().astype("<i2").tobytes())
        line = {"voice": "us_f", "text": "la", "offset": 0, "samples": len(sound)}
        (folder / f"shard-{shard:05d}.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def trainer_for(corpus: Path, plan: Plan = PLAN) -> Trainer:
    reel = Reel(corpus, 0.01, 16_000, CPU)
    reel.refresh()
    trainer = Trainer(plan, reel, CPU, torch.float32)
    initialise(trainer.codec, reel.crops(plan.batch, plan.length))
    trainer.follow()
    return trainer


def run_for(trainer: Trainer, out: Path, steps: int) -> Run:
    out.mkdir(exist_ok=True)
    trainer.plan = replace(trainer.plan, max_steps=steps)
    return Run(trainer, out, began=time.monotonic(), log_every=2)


def initialised() -> Codec:
    codec = Codec(TINY)
    initialise(codec, torch.stack([babble(0.32, seed) for seed in range(2)]))
    return codec


@torch.no_grad()
def test_the_training_form_computes_what_the_modules_compute() -> None:
    codec, past = initialised(), NoPast()
    for weight in codec.parameters():
        weight.add_(0.05 * torch.randn_like(weight))
    samples = torch.stack([babble(0.32, seed) for seed in range(2)])
    latent = codec.encoder(samples[:, None], past)
    for resample, mix in codec.quantizer.downsample:
        latent = mix(resample(latent, past), past)
    latent = codec.quantizer.pre_module(latent, past)
    found = encode_latent(codec, samples, torch.float32)
    assert torch.allclose(found.transpose(1, 2), latent, atol=1e-4)
    made = codec.decoder(codec.quantizer.upscale(latent, past), past).squeeze(1)
    assert torch.allclose(decode_latent(codec, found, torch.float32), made, atol=1e-4)


@torch.no_grad()
def test_training_looks_up_the_codes_that_encoding_gives() -> None:
    codec = initialised()
    samples = torch.stack([babble(0.32, seed) for seed in range(2)])
    latent = encode_latent(codec, samples, torch.float32)
    lay_out_codebooks(codec, torch.randn(500, 32), rounds=2)
    found = quantise(codec, latent, torch.tensor([3, 3]))
    codes = codec.encode(samples)
    assert torch.equal(found.codes.unflatten(1, (2, -1)).transpose(0, 1), codes)
    assert torch.allclose(found.latent.transpose(1, 2), codec.quantizer.lookup(codes), atol=1e-5)


@torch.no_grad()
def test_inactive_codebooks_leave_no_trace_in_the_latent() -> None:
    codec = initialised()
    latent = torch.randn(2, 5, 32)
    lay_out_codebooks(codec, torch.randn(500, 32), rounds=2)
    fewer = quantise(codec, latent, torch.tensor([1, 3])).latent
    assert torch.equal(fewer[0], quantise(codec, latent, torch.tensor([1, 1])).latent[0])
    assert torch.equal(fewer[1], quantise(codec, latent, torch.tensor([3, 3])).latent[1])


@torch.no_grad()
def test_an_initialised_codec_passes_sound_at_an_even_level() -> None:
    codec = initialised()
    samples = torch.stack([babble(0.32, seed) for seed in range(2)])
    assert 0.02 < decode_latent(codec, encode_latent(codec, samples, torch.float32), torch.float32).std() < 0.1
    assert 0.2 < codec.encoder(samples[:, None], NoPast()).std() < 0.6


@torch.no_grad()
def test_laid_out_codebooks_are_all_in_use_and_each_leaves_less() -> None:
    codec = initialised()
    latents = torch.randn(2000, 32) * torch.linspace(0.1, 2, 32)
    lay_out_codebooks(codec, latents)
    every = latents[None]
    left = [latents.square().mean()]
    for active in (1, 2, 3):
        left.append((every - quantise(codec, every, torch.tensor([active])).latent).square().mean())
    assert left[0] > left[1] > left[2] > left[3]
    codes = quantise(codec, every, torch.tensor([3])).codes
    assert min(perplexities(codes, 32)) > 20


def test_dead_codes_move_onto_recent_queries_and_living_ones_stay() -> None:
    codec = initialised()
    before = [book.codebook.weight.detach().clone() for book in codebooks(codec)]
    uses = torch.ones(3, 32, dtype=torch.long)
    uses[1, 5] = 0
    queries = torch.randn(3, 7, 8)
    assert revive(codec, uses, queries) == 1
    after = [book.codebook.weight for book in codebooks(codec)]
    changed = [(a != b).any(1).nonzero().flatten().tolist() for a, b in zip(after, before, strict=True)]
    assert changed == [[], [5], []]
    assert any(torch.equal(after[1][5], query) for query in queries[1])


def test_mel_loss_is_zero_for_the_same_sound_and_ignores_what_is_below_the_floor() -> None:
    loss, sound = MelLoss(16_000), babble(0.64, 0)[None]
    assert loss(sound, sound) == 0
    assert loss(torch.zeros_like(sound), 1e-7 * sound) == 0
    assert loss(0.5 * sound, sound) > 0.3


def test_every_discriminator_learns_from_both_sides() -> None:
    discriminators = Discriminators(width=8)
    opinion = discriminators(torch.stack([babble(0.32, seed) for seed in range(2)]))
    assert len(opinion.logits) == 8
    sum(part.square().mean() for part in (*opinion.logits, *opinion.features)).backward()
    assert all(weight.grad is not None for weight in discriminators.parameters())


@pytest.mark.parametrize(("channels", "out", "kernel", "stride", "steps"), [(8, 16, 5, 3, 100), (16, 1, 3, 1, 77)])
def test_both_forms_of_a_discriminators_convolution_are_equal(
    channels: int, out: int, kernel: int, stride: int, steps: int
) -> None:
    layer, x = TimeConv(channels, out, kernel, stride), torch.randn(3, steps, channels)
    # One silent channel more, and the layer takes its other form.
    wider = TimeConv(channels + 1, out, kernel, stride)
    with torch.no_grad():
        widened = torch.nn.functional.pad(layer.weight().unflatten(1, (kernel, -1)), (0, 1)).flatten(1)
        wider.direction.copy_(widened)
        wider.length.copy_(layer.length)
    assert torch.allclose(layer(x), wider(torch.nn.functional.pad(x, (0, 1))), atol=1e-5)


def test_a_gradient_beyond_all_measure_leaves_the_weights_alone(corpus: Path) -> None:
    trainer = trainer_for(corpus)
    for weight in trainer.codec.parameters():
        weight.grad = torch.ones_like(weight)
    trainer._clip()
    for spike in (float("inf"), float("nan"), 1e30):
        for weight in trainer.codec.parameters():
            weight.grad = torch.full_like(weight, 1.0)
            weight.grad.view(-1)[0] = spike
        trainer._clip()
        assert all(weight.grad.isfinite().all() and weight.grad.max() <= 1 for weight in trainer.codec.parameters())


def test_twenty_steps_bring_the_loss_down(corpus: Path, tmp_path: Path) -> None:
    trainer = trainer_for(corpus, replace(PLAN, free_steps=20))
    trainer.step(Mode(False, False))
    first = trainer.stats()["mel"]
    run_for(trainer, tmp_path / "out", 20).go()
    trainer.means.clear()
    trainer.step(Mode(False, False))
    assert trainer.stats()["mel"] < 0.9 * first


def test_a_run_goes_through_all_stages_and_its_codec_streams(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    trainer = trainer_for(corpus, replace(PLAN, adversary_from=0.0))
    run_for(trainer, out, 12).go()
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["mode"] for line in log if "mode" in line] == [
        {"codes": False, "adversary": False},
        {"codes": True, "adversary": True},
    ]
    assert {"mel_3", "perplexity"} <= log[-1]["validation"].keys()
    codec = load_codec(out)
    samples = trainer.reel.held_out[None, : 640 * 9]
    codes = codec.encode(samples)
    stream = StreamingDecoder(codec, 1)
    pieces = torch.cat([stream.decode(piece, [0]) for piece in codes.split(2, dim=-1)], dim=-1)
    assert torch.allclose(pieces, codec.decode(codes), atol=1e-5)


def test_a_resumed_run_goes_on_where_it_stopped(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = replace(PLAN, adversary_from=0.0, revive_every=100)
    first = trainer_for(corpus, plan)
    run_for(first, out, 4).go()
    second = trainer_for(corpus, plan)
    second.load(torch.load(out / "state.pt", weights_only=True))
    assert second.pace.step == 4
    for a, b in zip(first.state()["ema"].values(), second.state()["ema"].values(), strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(1)
    run_for(first, out, 6).go()
    torch.manual_seed(1)
    run_for(second, out, 6).go()
    assert second.pace.step == 6
    for a, b in zip(first.codec.parameters(), second.codec.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_loss_that_is_no_number_stops_the_run(corpus: Path, tmp_path: Path) -> None:
    trainer = trainer_for(corpus)
    with torch.no_grad():
        codebooks(trainer.codec)[0].out_proj.weight.fill_(0)
        trainer.codec.decoder.model[0].conv.weight[0, 0, 0] = float("nan")
    with pytest.raises(Diverged):
        run_for(trainer, tmp_path / "out", 20).go()
    assert trainer.pace.step <= 2
    assert not (tmp_path / "out" / "codec.safetensors").exists()


def test_a_run_that_diverges_goes_back_to_its_checkpoint_at_half_the_rate(corpus: Path, tmp_path: Path) -> None:
    trainer = trainer_for(corpus, replace(PLAN, recoveries=1))
    run = run_for(trainer, tmp_path / "out", 4)
    run.go()
    with torch.no_grad():
        trainer.codec.decoder.model[0].conv.weight.fill_(float("nan"))
    trainer.plan = replace(trainer.plan, max_steps=6)
    run.go()
    assert trainer.pace.step == 6
    assert trainer.pace.rate_scale == 0.5
    assert all(weight.isfinite().all() for weight in trainer.codec.parameters())


def test_frozen_codes_stay_bit_identical_while_the_decoding_side_learns(corpus: Path, tmp_path: Path) -> None:
    done, out = tmp_path / "done", tmp_path / "out"
    run_for(trainer_for(corpus), done, 2).go()
    # Narrower than those of the command line, which starts new ones when there are none.
    (done / "companions.safetensors").unlink()
    options = ["--corpus", str(corpus), "--out", str(out), "--start", str(done), "--freeze-codes", "--plain"]
    options += ["--decoded-frames", "3", "--depth", "2"]
    main([*options, "--batch", "2", "--frames", "8", "--hours", "0.01", "--max-steps", "2", "--minutes", "5"])
    before, after = load_codec(done), load_codec(out)
    samples = torch.from_numpy(np.fromfile(corpus / "shard-00000.pcm", dtype="<i2")).float()[None] / 32768
    assert torch.equal(before.encode(samples), after.encode(samples))
    trained = ("quantizer.post_module.", "quantizer.upsample.", "decoder.")
    changed = {name for name, value in before.state_dict().items() if not torch.equal(value, after.state_dict()[name])}
    assert changed
    assert all(name.startswith(trained) for name in changed)
    assert codec_fingerprint(before) == codec_fingerprint(after)


def test_files_are_split_at_the_given_size_and_read_back_equal(tmp_path: Path) -> None:
    codec = initialised()
    save_codec(codec, tmp_path, piece_bytes=40_000)
    assert len(list(tmp_path.glob("codec-*.safetensors"))) > 1
    again = load_codec(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(codec.parameters(), again.parameters(), strict=True))


@torch.no_grad()
def test_a_codec_of_fewer_codebooks_gives_the_first_codes_of_the_whole() -> None:
    codec = initialised()
    samples = babble(0.32, 0)[None]
    assert torch.equal(keep_codebooks(codec, 2).encode(samples), codec.encode(samples)[:, :2])


def test_a_checkpoint_of_the_command_line_can_be_prepared_again(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_for(trainer_for(corpus), out, 8).go()
    options = parse_arguments(["--corpus", str(corpus), "--out", str(out), "--resume", str(out / "state.pt")])
    plan = replace(make_plan(options), batch=2, frames=8, discriminator_width=8)
    assert plan.config == TINY
    trainer = Trainer(plan, Reel(corpus, 0.01, 16_000, CPU), CPU, torch.float32)
    assert prepare(trainer, options) > 0
    assert trainer.pace.step == 8


def test_crops_come_with_the_phoneme_spoken_at_the_start_of_each_frame(corpus: Path) -> None:
    step = 16_000 // PHONEMES_PER_SECOND
    for shard in range(3):
        sound = np.arange(6 * step, dtype="<i2") // step * 10 + 1  # the samples of a step name the step
        (corpus / f"shard-{shard:05d}.pcm").write_bytes(sound.astype("<i2").tobytes())
        (corpus / f"shard-{shard:05d}.phonemes").write_bytes((np.arange(6) * 10 + 1).astype(np.uint8).tobytes())
    reel = Reel(corpus, 0.001, 16_000, CPU)
    reel.refresh()
    samples, phonemes = reel.labelled_crops(50, 4 * 640, 640)
    named = (samples * 32768).round().long()[:, 640 // 3 :: 640]
    assert torch.equal(named, phonemes)
    assert len(named.unique()) > 3


def test_shards_without_phonemes_add_nothing_to_the_phoneme_loss(corpus: Path) -> None:
    trainer = trainer_for(corpus)
    _, phonemes = trainer.examples()
    assert (phonemes == UNKNOWN).all()
    assert phoneme_loss(torch.randn(2, 8, 178), phonemes) == 0
    loss = phoneme_loss(torch.zeros(2, 8, 178), torch.where(torch.arange(8) > 3, 5, phonemes))
    assert torch.isclose(loss, torch.tensor(178.0).log())


def test_augmented_examples_stay_in_range_and_others_change_in_level_only() -> None:
    samples = torch.stack([babble(0.64, seed) for seed in range(8)])
    level = augment(samples, 16_000, share=0.0)
    ratio = level / samples
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-3)
    changed = augment(samples, 16_000, share=1.0)
    assert changed.isfinite().all()
    assert changed.abs().max() <= 0.971
    alike = torch.nn.functional.cosine_similarity(changed, samples)
    assert (alike < 0.999).all()


def test_a_run_started_from_a_finished_one_has_its_discriminators_and_classifier(corpus: Path, tmp_path: Path) -> None:
    first, second = trainer_for(corpus), trainer_for(corpus, replace(PLAN, seed=1))
    save_companions(first, tmp_path / "companions.safetensors")
    load_companions(second, tmp_path / "companions.safetensors")
    for part in ("discriminators", "classifier"):
        for a, b in zip(getattr(first, part).parameters(), getattr(second, part).parameters(), strict=True):
            assert torch.allclose(a, b, rtol=2e-3, atol=1e-6)
