"""GPU tests: graphs, kernels and eager operators give the same output, alone and in a batch."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import random_checkpoint
from shoal.checkpoint.resolve import resolve_model
from shoal.codec.fused import FusedDecoder
from shoal.codec.plain_graphs import PlainGraphDecoder
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.execution.fused import FusedPrefill, ResidualStream
from shoal.engine.kv_cache import PagedKV
from shoal.engine.load import voice_cache
from shoal.engine.preprocess import build_turns
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.utterance import Turn, Utterance
from shoal.model.cache import NoKVCache
from shoal.model.slow import Head
from shoal.quantize.apply import quantize_model
from shoal.quantize.modes import WeightModes
from shoal.speech import SamplingParams

pytestmark = pytest.mark.gpu

ROWS = 64


@pytest.fixture(scope="module")
def small() -> Checkpoint:
    return random_checkpoint("tiny", dtype=torch.float32, device="cuda")


@pytest.fixture(scope="module")
def full() -> Checkpoint:
    """The released sizes in bf16."""
    return random_checkpoint("s1-mini", device="cuda", encoder=False)


@pytest.fixture(scope="module")
def nano() -> Checkpoint:
    return resolve_model("nano", dtype=torch.float32, device="cuda")


def sentences(core: EngineCore, temperature: float, home: Path) -> list[np.ndarray]:
    texts = ["The harbour was quiet in the morning.", "The boats came back at noon."]
    voice = voice_cache(core.checkpoint, home).resolve_blocking(core.checkpoint.profile.voice)
    utterances = [
        Utterance(
            number, build_turns(text, voice, core.checkpoint), SamplingParams(seed=number, temperature=temperature)
        )
        for number, text in enumerate(texts)
    ]
    return finished(core, utterances)


def said(core: EngineCore, count: int, frames: int, **sampling: float) -> list[np.ndarray]:
    width, stop = 1 + core.checkpoint.model.config.num_codebooks, core.checkpoint.model.config.stop_id
    utterances = []
    for number in range(count):
        prompt = np.zeros((5 + 3 * number, width), np.int32)
        prompt[:, 0] = np.arange(len(prompt)) % min(stop, 200)
        settings = SamplingParams(seed=number, max_frames=frames, **sampling)  # type: ignore[arg-type]
        utterances.append(Utterance(number, [Turn("hm", prompt, prompt)], settings))
    return finished(core, utterances)


def finished(core: EngineCore, utterances: list[Utterance]) -> list[np.ndarray]:
    for utterance in utterances:
        core.add(utterance)
    for _ in range(1000):
        if core.idle:
            return [each.all_codes() for each in utterances]
        for event in core.step():
            assert event.error is None, event.error
    raise AssertionError("the engine does not come to an end")


def engine(checkpoint: Checkpoint, slots: int, backend: str) -> EngineCore:
    core = EngineCore(checkpoint, EngineConfig(slots=slots, guard=False, backend=backend, kv_bytes=1 << 30))
    assert core.runner.backend == backend
    return core


def first_unlike(ours: list[np.ndarray], theirs: list[np.ndarray]) -> dict[int, object]:
    """Return, by request, the first frame that differs and both versions of it, or both numbers of frames."""
    found: dict[int, object] = {}
    for request, (one, two) in enumerate(zip((codes.T for codes in ours), (codes.T for codes in theirs), strict=True)):
        unlike = [frame for frame in range(min(len(one), len(two))) if (one[frame] != two[frame]).any()]
        if unlike:
            found[request] = unlike[0], one[unlike[0]].tolist(), two[unlike[0]].tolist()
        elif len(one) != len(two):
            found[request] = len(one), len(two)
    return found


@pytest.mark.parametrize("settings", [{"temperature": 1e-5, "top_p": 0.5}, {"repetition_penalty": 1.3}], ids=str)
def test_every_backend_generates_the_same_frames(small: Checkpoint, settings: dict[str, float]) -> None:
    plain = said(engine(small, 3, "eager"), 3, 12, **settings)
    for backend in ("fused", "graph", "plain-graph"):
        frames = said(engine(small, 3, backend), 3, 12, **settings)
        assert first_unlike(frames, plain) == {}, backend


@pytest.mark.parametrize("temperature", [1e-5, 0.7])
def test_nano_generates_the_same_frames_on_every_backend(nano: Checkpoint, temperature: float, tmp_path: Path) -> None:
    spoken = {
        backend: sentences(engine(nano, 2, backend), temperature, tmp_path) for backend in ("eager", "fused", "graph")
    }
    assert min(codes.shape[1] for codes in spoken["eager"]) > 20
    for backend in ("fused", "graph"):
        assert all(map(np.array_equal, spoken[backend], spoken["eager"])), backend


@pytest.mark.parametrize("backend", ["graph", "fused"])
def test_requests_that_compute_a_common_prefix_in_one_step_give_the_frames_that_they_give_alone(
    full: Checkpoint, backend: str
) -> None:
    core, width = engine(full, 12, backend), 1 + full.model.config.num_codebooks
    prompts = np.zeros((12, 330, width), np.int32)
    prompts[:, :, 0] = np.arange(330) % 200
    prompts[:, 300:, 0] += np.arange(12)[:, None]  # twelve texts after one voice

    def utterance(number: int) -> Utterance:
        turn = Turn("hm", prompts[number], prompts[number])
        return Utterance(number, [turn], SamplingParams(seed=number, max_frames=10))

    together = finished(core, [utterance(number) for number in range(12)])
    assert core.pool.stats.tokens_saved == 11 * (300 // 16 * 16)
    for number in (0, 1, 11):
        core.pool.clear_cache()
        assert np.array_equal(finished(core, [utterance(number)])[0], together[number])


def test_requests_give_the_same_frames_while_frames_wait_for_the_prompts_of_a_burst(full: Checkpoint) -> None:
    core = EngineCore(
        full,
        EngineConfig(slots=20, guard=False, backend="graph", kv_bytes=1 << 30, token_budget=64, prefix_cache=False),
    )
    waited, postpone = list[bool](), core.scheduler._postpone_frames

    def note(eligible: list[Sequence], budget: int) -> bool:
        waited.append(postpone(eligible, budget))
        return waited[-1]

    core.scheduler._postpone_frames = note  # type: ignore[method-assign]
    together = said(core, 20, 10)
    assert any(waited)
    assert np.array_equal(said(core, 1, 10)[0], together[0])


def test_a_request_gives_the_same_frames_alone_and_in_a_batch(full: Checkpoint) -> None:
    core = engine(full, 20, "graph")
    together = said(core, 20, 10)
    alone = said(core, 2, 10)
    assert np.array_equal(alone[0], together[0])
    assert np.array_equal(alone[1], together[1])


def utterances(checkpoint: Checkpoint, numbers: range) -> list[Utterance]:
    width, stop = 1 + checkpoint.model.config.num_codebooks, checkpoint.model.config.stop_id
    prompts = [np.zeros((4 + number % 13, width), np.int32) for number in numbers]
    for number, prompt in zip(numbers, prompts, strict=True):
        prompt[:, 0] = (number + np.arange(len(prompt))) % min(stop, 200)
    return [
        Utterance(number, [Turn("hm", prompt, prompt)], SamplingParams(seed=number, max_frames=60))
        for number, prompt in zip(numbers, prompts, strict=True)
    ]


def assert_same_alone_and_together(checkpoint: Checkpoint, slots: int) -> None:
    """Compare codes of full batches; rounding differences of a kernel show after tens of frames."""
    core = engine(checkpoint, slots, "graph")
    together = finished(core, utterances(checkpoint, range(slots)))
    for number in (0, slots // 2, slots - 1):
        alone = finished(core, utterances(checkpoint, range(number, number + 1)))[0]
        assert np.array_equal(alone, together[number])


@pytest.mark.parametrize("slots", [192, 384, 512])
def test_codes_do_not_depend_on_the_number_of_slots(full: Checkpoint, slots: int) -> None:
    assert_same_alone_and_together(full, slots)


@pytest.mark.parametrize(("mode", "slots"), [("int8", 16), ("int8", 96), ("fp8", 40)])
def test_codes_of_quantized_weights_do_not_depend_on_the_number_of_slots(mode: str, slots: int) -> None:
    checkpoint = random_checkpoint("s1-mini", device="cuda", encoder=False)
    quantize_model(checkpoint.model, WeightModes.parse(mode))
    assert_same_alone_and_together(checkpoint, slots)


@torch.inference_mode()
def test_the_kernels_are_as_close_to_fp32_as_the_eager_path(full: Checkpoint) -> None:
    model = full.model
    tokens = torch.randint(0, 1000, (ROWS, 1 + model.config.num_codebooks), device="cuda")
    tokens[ROWS // 2 :, 0] += model.config.semantic_begin_id
    positions = torch.arange(ROWS, device="cuda")
    exact_model = copy.deepcopy(model.slow).float()
    exact = exact_model(tokens, positions, NoKVCache(1))
    plain = model.slow(tokens, positions, NoKVCache(1)).float()
    kv = PagedKV(model.config.slow, 8, 16, torch.bfloat16, "cuda")
    prompt = FusedPrefill(model, kv, torch.arange(8, dtype=torch.int32, device="cuda")[None], ROWS)
    prompt.positions.copy_(positions)
    stream = ResidualStream(prompt.embed(tokens, prompt._rows))
    for layer in range(model.config.slow.n_layer):
        prompt.layer(stream, layer)
    stream.normed(model.slow.norm)  # reduces the partials
    head = Head(model.slow).float()
    logits = [head(exact_model.norm(each.float())) for each in (exact, plain, stream.x)]
    assert (logits[2] - logits[0]).norm() <= 1.1 * (logits[1] - logits[0]).norm()


def test_the_plain_graph_codec_streams_close_to_the_eager_one(full: Checkpoint) -> None:
    decoder = PlainGraphDecoder(full.codec, 3, capture=True)
    codes = torch.randint(0, 1000, (2, 10, 20))
    pieces = [decoder.decode(piece, [0, 2]) for piece in codes.split([1, 2, 7, 10], dim=-1)]
    plain = full.codec.decode(codes.cuda()).cpu()
    assert (torch.cat(pieces, dim=-1) - plain).norm() / plain.norm() < 1e-3


def test_the_graph_codec_streams_exactly_and_close_to_the_eager_one(full: Checkpoint) -> None:
    decoder = FusedDecoder(full.codec, 3, torch.float16, capture=True)
    codes = torch.randint(0, 1000, (2, 10, 20))
    whole = decoder.decode(codes, [0, 2])
    decoder.reset([0, 2])
    pieces = [decoder.decode(piece, [0, 2]) for piece in codes.split([1, 2, 7, 10], dim=-1)]
    assert torch.equal(torch.cat(pieces, dim=-1), whole)
    plain = full.codec.decode(codes.cuda()).cpu()
    assert (whole - plain).norm() / plain.norm() < 5e-3
