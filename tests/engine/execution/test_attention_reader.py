"""Attention weights over the text of a turn: the same on every backend, and without effect on the frames."""

from dataclasses import replace
from itertools import cycle, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shoal.checkpoint.format.profile import Alignment
from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import random_checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.execution.attention_reader import PathReader
from shoal.engine.execution.fused import FusedFrame, ResidualStream
from shoal.engine.execution.plain_graphs import PlainGraphRunner
from shoal.engine.execution.runner import PipelinedRunner
from shoal.engine.execution.text_rows import TextRows
from shoal.engine.output.word_times import MonotonicPath, WordPlan
from shoal.engine.preprocess import build_turns, plan_turns
from shoal.engine.utterance import TextTokens, Utterance
from shoal.kernels.word_times.text_path_numpy import path_origins
from shoal.model.cache import DenseKVCache
from shoal.model.slow import Head
from shoal.native.library import NativeUnavailable, open_library
from shoal.speech import SamplingParams
from shoal.text.plan import TextPlan, TurnText
from shoal.tools.calibrate import WeightRecorder
from tests.engine.execution.test_fallback import speak_all

HEADS = ((0, 1), (1, 0), (1, 3))
TEXTS = ("the tide", "a tide that is coming in from the sea")
FRAMES = 3


def with_heads(checkpoint: Checkpoint, heads: tuple[tuple[int, int], ...] = HEADS) -> Checkpoint:
    return replace(checkpoint, profile=replace(checkpoint.profile, alignment=Alignment(heads)))


def core_of(checkpoint: Checkpoint, backend: str, *, record_weights: bool = True) -> EngineCore:
    config = EngineConfig(slots=3, guard=False, kv_bytes=1 << 20, backend=backend)
    core = EngineCore(checkpoint, config, record_weights=record_weights)
    assert core.runner.backend == backend, core.runner.reasons
    if backend == "plain-graph":  # sizes so small that two sequences run in two groups
        runner = PlainGraphRunner(core.runner._eager, capture=False, buckets=(1, 2), widths=(32,), prompts=(16,))
        core.runner.runner = PipelinedRunner(runner, 0)
    return core


def utterances(checkpoint: Checkpoint, *, reading: bool) -> list[Utterance]:
    made = []
    for number, text in enumerate(TEXTS):
        plan = TextPlan((TurnText(text),))
        turns = plan_turns(plan, {None: None}, checkpoint, words=reading)
        utterance = Utterance(number, turns, SamplingParams(seed=number, max_frames=FRAMES))
        # The last one does not ask: a batch may hold both.
        utterance.words = WeightRecorder(WordPlan((), [[]]), 0.04) if reading else None
        made.append(utterance)
    return made


def spoken(core: EngineCore, *, reading: bool = True) -> list[Utterance]:
    made = utterances(core.checkpoint, reading=reading)
    silent = Utterance(9, build_turns("hm", None, core.checkpoint), SamplingParams(max_frames=FRAMES))
    speak_all(core, [made[0], silent, made[1]])
    return made


def weights_of(utterance: Utterance) -> np.ndarray:
    assert isinstance(utterance.words, WeightRecorder)
    return np.stack(utterance.words.weights[0])  # [frames, heads, tokens]


@pytest.fixture(scope="module", params=["s1", "s2"])
def expected(
    request: pytest.FixtureRequest, tiny: Checkpoint, tiny_s2: Checkpoint
) -> tuple[Checkpoint, list[Utterance]]:
    checkpoint = with_heads(tiny if request.param == "s1" else tiny_s2)
    return checkpoint, spoken(core_of(checkpoint, "eager"))


@pytest.mark.parametrize("backend", ["native", "plain-graph"])
def test_every_backend_reads_the_weights_of_the_eager_one(
    backend: str, expected: tuple[Checkpoint, list[Utterance]]
) -> None:
    if backend == "native":
        try:
            open_library()
        except NativeUnavailable as error:
            pytest.skip(f"no native library: {error}")
    checkpoint, eager = expected
    for ours, theirs in zip(spoken(core_of(checkpoint, backend)), eager, strict=True):
        assert np.array_equal(ours.all_codes(), theirs.all_codes())
        np.testing.assert_allclose(weights_of(ours), weights_of(theirs), atol=2e-5)


def assert_paths(spoken: list[Utterance], expected: list[Utterance]) -> None:
    """The recorder takes what is read: here the path, which is that of the expected weights."""
    for ours, theirs in zip(spoken, expected, strict=True):
        assert isinstance(ours.words, WeightRecorder)
        found, known = MonotonicPath(100), MonotonicPath(100)
        for one, other in zip(ours.words.weights[0], path_origins(weights_of(theirs)), strict=True):
            found.feed(one)
            known.feed(other)
            assert found.tokens() == known.tokens()


@pytest.mark.parametrize("backend", ["eager", "native", "plain-graph"])
def test_every_backend_finds_the_path_of_the_weights(
    backend: str, expected: tuple[Checkpoint, list[Utterance]]
) -> None:
    checkpoint, eager = expected
    assert_paths(spoken(core_of(checkpoint, backend, record_weights=False)), eager)


def test_another_backend_continues_the_path(expected: tuple[Checkpoint, list[Utterance]]) -> None:
    """Native and eager backend in turn; the eager one takes over when the native one fails."""
    checkpoint, eager = expected
    core = core_of(checkpoint, "native", record_weights=False)
    launchers = cycle((core.runner.runner.launcher, core.runner._eager))
    core.runner.runner = PipelinedRunner(SimpleNamespace(launch=lambda batch: next(launchers).launch(batch)), 0)
    assert_paths(spoken(core), eager)


def test_weights_are_those_of_the_text_and_add_up_to_one(expected: tuple[Checkpoint, list[Utterance]]) -> None:
    _, eager = expected
    for utterance in eager:
        tokens = utterance.turns[0].text_tokens
        assert tokens is not None
        found = weights_of(utterance)
        assert found.shape == (FRAMES, len(HEADS), tokens.count)
        assert found.sum(-1) == pytest.approx(1, abs=1e-5)


@torch.inference_mode()
def test_weights_are_the_softmax_of_queries_and_keys(expected: tuple[Checkpoint, list[Utterance]]) -> None:
    checkpoint, eager = expected
    utterance, slow = eager[1], checkpoint.model.slow
    prompt, codes = utterance.turns[0].prompt, utterance.all_codes()
    semantic = codes[:1] + checkpoint.model.config.semantic_begin_id
    grid = np.concatenate((prompt, np.concatenate((semantic, codes)).T[:1]))
    config = checkpoint.model.config.slow
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    class Cache(DenseKVCache):
        def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kept[layer] = (q, k)
            return super().attend(layer, q, k, v)

    cache = Cache(config, 1, len(grid), torch.float32, torch.device("cpu"))
    slow(torch.from_numpy(grid.astype(np.int64)), torch.arange(len(grid)), cache)
    tokens = utterance.turns[0].text_tokens
    assert tokens is not None
    begin = len(prompt) - tokens.after - tokens.count
    for number, (layer, head) in enumerate(HEADS):
        q, k = kept[layer]
        key = k[begin : begin + tokens.count, head // (config.n_head // config.n_local_heads)]
        expected_weights = (key @ q[-1, head] * config.head_dim**-0.5).softmax(0)
        np.testing.assert_allclose(weights_of(utterance)[1, number], expected_weights.numpy(), atol=2e-5)


def test_a_request_without_word_times_reads_nothing(tiny: Checkpoint) -> None:
    core = core_of(with_heads(tiny), "eager", record_weights=False)
    made = spoken(core, reading=False)
    assert all(each.words is None and each.sequence.text is None for each in made)
    assert core.runner._eager.kv.queries == {}
    assert not TextRows.of([each.sequence for each in made])


@torch.inference_mode()
def test_the_fused_backend_keeps_the_queries_of_a_layer_for_the_kernel(tiny: Checkpoint) -> None:
    """One layer only: the interpreter takes seconds for a whole frame."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    core = core_of(with_heads(tiny), "eager")
    eager, config = core.runner._eager, tiny.model.config.slow
    eager.kv.keys.normal_()
    tables = torch.arange(2 * 3, dtype=torch.int32).reshape(2, 3)
    head = Head(tiny.model.slow)
    frame = FusedFrame(tiny.model, head, eager.kv, eager.slots, tables, 2, eager.attention_reader.layers)
    frame.inputs[:2] = torch.tensor([[0, 1], [40, 30]])
    for layer in eager.attention_reader.layers:
        frame.layer(ResidualStream(torch.randn(2, config.dim)), layer)
    texts = TextRows([5, 4], [0, 1], [2, 0], [20, 7])
    frame.inputs[2:] = torch.tensor([texts.begins, texts.lengths])
    reader = eager.attention_reader
    ours = dict(reader.start_copy(reader.launch(frame.queries, tables, frame.texts), texts).by_row())
    theirs = dict(reader.read(frame.queries, tables, texts).by_row())
    assert {row: found.shape for row, found in ours.items()} == {5: (3, 20), 4: (3, 7)}
    for row, found in theirs.items():
        np.testing.assert_allclose(ours[row], found, atol=1e-6)
    eager.slots.state.frame[:] = 1
    paths = PathReader(HEADS, eager.kv, eager.slots)
    launched = dict(paths.start_copy(paths.launch(frame.queries, tables, frame.texts), texts).by_row())
    for row, found in paths.read(frame.queries, tables, texts).by_row():
        end = 1 + texts.lengths[texts.rows.index(row)]
        assert launched[row][:end].tolist() == found[:end].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["graph", "fused"])
def test_the_kernels_find_the_path_of_the_weights_that_they_read(backend: str) -> None:
    checkpoint = with_heads(random_checkpoint("tiny", device="cuda"))
    weights = spoken(core_of(checkpoint, backend))
    assert_paths(spoken(core_of(checkpoint, backend, record_weights=False)), weights)


def test_all_heads_of_a_model_can_be_read(tiny: Checkpoint) -> None:
    slow = tiny.model.config.slow
    every = tuple(product(range(slow.n_layer), range(slow.n_head)))
    found = weights_of(spoken(core_of(with_heads(tiny, every), "native"))[0])
    assert found.shape[1] == slow.n_layer * slow.n_head
    assert isinstance(utterances(with_heads(tiny), reading=True)[0].turns[0].text_tokens, TextTokens)
