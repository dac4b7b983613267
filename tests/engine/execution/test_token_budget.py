"""Prompt tokens per step: as configured, or what the backend in use computes in a few milliseconds."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import random_checkpoint
from shoal.config import DEFAULT_TOKEN_BUDGET, EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.execution.fallback import FallbackRunner
from shoal.engine.execution.graphs import (
    LARGE_PROMPTS,
    MAX_TOKEN_BUDGET,
    PROMPTS,
    FusedRunner,
    affordable_tokens,
    prompt_chunks,
)
from shoal.engine.output.audio_decoder import AudioDecoder
from shoal.engine.scheduling.scheduler import burst_tokens
from shoal.engine.utterance import Turn, Utterance
from shoal.kernels.cuda_graph import CapturedGraph
from shoal.speech import SamplingParams

CONFIG = EngineConfig(slots=2, guard=False, kv_bytes=1 << 22, backend="eager")


@pytest.mark.parametrize(
    ("milliseconds", "tokens", "expected"),
    [
        pytest.param(2.46, 512, 2048, id="S1-mini on an H200"),
        pytest.param(11.8, 512, 512, id="S2-Pro on an H200"),
        pytest.param(5.9, 512, 1024, id="two almost fill the time"),
        pytest.param(6.1, 512, 512, id="two take too long"),
        pytest.param(300.0, 512, 512, id="a slow card keeps the default"),
        pytest.param(0.01, 512, MAX_TOKEN_BUDGET, id="bounded"),
        pytest.param(1.2, 256, 2048, id="the largest graph was left out"),
    ],
)
def test_a_faster_gpu_computes_more_prompt_tokens_per_step(milliseconds: float, tokens: int, expected: int) -> None:
    assert affordable_tokens(milliseconds / 1e3, tokens) == expected


def budget_of(core: EngineCore) -> int:
    core._plan()
    return core.scheduler.token_budget


def test_the_setting_wins_over_the_measured_budget(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FallbackRunner, "token_seconds", 4.5e-6)
    core = EngineCore(tiny, replace(CONFIG, token_budget=37))
    assert budget_of(core) == core.scheduler.burst_tokens == 37


def test_the_budget_follows_the_backend_in_use(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(tiny, CONFIG)
    assert budget_of(core) == DEFAULT_TOKEN_BUDGET
    eager = core.runner.runner.launcher
    fast = SimpleNamespace(token_budget=2048, token_seconds=4.5e-6, frame_seconds=2e-3)
    monkeypatch.setattr("shoal.engine.execution.fallback.FusedRunner", SimpleNamespace)
    core.runner.runner.launcher = fast  # type: ignore[assignment]
    monkeypatch.setattr(AudioDecoder, "exact_chunks", True)
    assert budget_of(core) == 2048
    assert core.scheduler.burst_tokens == burst_tokens(tiny.codec.config.frame_rate, 2048, 4.5e-6) > 2048
    assert core.audio_decoder.first_frames == 1
    monkeypatch.setattr(AudioDecoder, "exact_chunks", False)
    assert (budget_of(core), core.audio_decoder.first_frames) == (2048, 2)  # the second chunk would depend on time
    monkeypatch.setattr(AudioDecoder, "exact_chunks", True)
    core.runner.runner.launcher = eager
    assert budget_of(core) == DEFAULT_TOKEN_BUDGET
    assert core.scheduler.burst_tokens == 0
    assert core.audio_decoder.first_frames == 2


@pytest.mark.parametrize(
    ("milliseconds", "budget", "expected"),
    [
        pytest.param(2.3, 2048, 5120, id="S1-mini on an H200"),
        pytest.param(11.6, 512, 1024, id="S2-Pro on an H200"),
        pytest.param(7.9, 512, 1536, id="S2-Pro with w8a8 on an H200"),
        pytest.param(2.3, 6144, 0, id="a setting that takes longer than frames may wait"),
        pytest.param(40.0, 512, 0, id="a slow card"),
        pytest.param(math.inf, 512, 0, id="not measured"),
        pytest.param(0.0, 512, 0, id="prompts that cost nothing"),
    ],
)
def test_frames_wait_for_as_many_tokens_as_take_half_a_frame(milliseconds: float, budget: int, expected: int) -> None:
    assert burst_tokens(21.5, budget, milliseconds / 1e3 / 512) == expected


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [
        (0, []),
        (40, [(64, 40)]),
        (512, [(512, 512)]),
        (600, [(512, 512), (96, 88)]),
        (896, [(512, 512), (384, 384)]),
        (900, [(1024, 900)]),
        (1100, [(1024, 1024), (96, 76)]),
        (1500, [(1024, 1024), (512, 476)]),
        (1800, [(2048, 1800)]),
        (5120, [(2048, 2048), (2048, 2048), (1024, 1024)]),
    ],
)
def test_large_prompt_graphs_are_used_only_if_they_are_filled(tokens: int, chunks: list[tuple[int, int]]) -> None:
    assert list(prompt_chunks(tokens, (*PROMPTS, *LARGE_PROMPTS))) == chunks


@pytest.mark.parametrize(
    ("sizes", "chunks"), [((32, 64), [(64, 64), (64, 64), (32, 22)]), ((1024,), [(1024, 150)])], ids=str
)
def test_prompts_are_split_by_the_sizes_that_are_left(sizes: tuple[int, ...], chunks: list[tuple[int, int]]) -> None:
    assert list(prompt_chunks(150, sizes)) == chunks


@pytest.mark.gpu
def test_large_prompt_graphs_write_the_bits_of_several_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, caches = random_checkpoint("s1-mini", device="cuda", encoder=False), []
    monkeypatch.setattr("shoal.engine.execution.graphs.BURST_SECONDS", math.inf)  # captured on any GPU
    for sizes in ((), LARGE_PROMPTS, (*LARGE_PROMPTS, 4096)):  # 4,096 are more than the budget
        monkeypatch.setattr("shoal.engine.execution.graphs.LARGE_PROMPTS", sizes)
        config = replace(CONFIG, backend="graph", kv_bytes=1 << 30, token_budget=2048)
        core = EngineCore(checkpoint, config)
        launcher = core.runner.runner.launcher
        assert isinstance(launcher, FusedRunner)
        assert max(launcher.graphs[1]) == (max(LARGE_PROMPTS) if sizes else 512)
        prompt = np.random.default_rng(0).integers(0, 150, (1900, 1 + checkpoint.model.config.num_codebooks))
        request = Utterance(
            1, [Turn("hm", prompt.astype(np.int32), prompt.astype(np.int32))], SamplingParams(max_frames=4)
        )
        core.add(request)
        while not core.idle:
            for event in core.step():
                assert event.error is None, event.error
        caches.append([each.clone() for each in (*launcher.eager.kv.keys, *launcher.eager.kv.values)])
    for small, *large in zip(*caches, strict=True):
        assert all(torch.equal(small, each) for each in large)


@pytest.mark.gpu
@pytest.mark.parametrize(("seconds", "budget", "frames"), [(0.003, 2048, 1), (0.010, 512, 2)])
def test_the_times_of_graphs_decide_on_prompts_and_first_chunks(
    seconds: float, budget: int, frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CapturedGraph, "replay_seconds", lambda graph, replays: seconds)
    core = EngineCore(random_checkpoint("s1-mini", device="cuda", encoder=False), replace(CONFIG, backend="graph"))
    launcher = core.runner.runner.launcher
    assert isinstance(launcher, FusedRunner)
    assert (budget_of(core), launcher.token_seconds) == (budget, seconds / 512)
    assert (launcher.frame_seconds, core.audio_decoder.first_frames) == (seconds, frames)


@pytest.mark.gpu
def test_replays_of_graphs_take_time() -> None:
    core = EngineCore(random_checkpoint("s1-mini", device="cuda", encoder=False), replace(CONFIG, backend="graph"))
    assert 0 < core.runner.token_seconds < 1
    assert 0 < core.runner.frame_seconds < 1
    assert torch.cuda.is_current_stream_capturing() is False
