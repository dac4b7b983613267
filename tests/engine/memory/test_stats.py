from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.memory import stats
from shoal.engine.memory.stats import free_memory, memory_stats
from shoal.engine.preprocess import build_turns
from shoal.engine.scheduling.scheduler import Batch, StepOutput
from shoal.engine.utterance import Utterance
from shoal.errors import GenerationFailed
from shoal.speech import SamplingParams


def test_memory_stats_include_the_resident_set() -> None:
    figures = memory_stats(torch.device("cpu"))
    assert figures.keys() == {"host"}
    assert figures["host"]["resident"] > 50 << 20


@pytest.mark.gpu
def test_memory_stats_of_a_gpu_include_used_total_and_allocated() -> None:
    held = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    vram = memory_stats(held.device)["vram"]
    assert 64 << 20 <= vram["allocated"] <= vram["used"] <= vram["all"]


@pytest.mark.parametrize(("integrated", "free"), [(True, 49 << 30), (False, 3 << 30)])
def test_a_gpu_that_shares_the_memory_of_the_host_can_use_what_files_are_cached_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, integrated: bool, free: int
) -> None:
    (tmp_path / "meminfo").write_text(f"MemFree: {3 << 20} kB\nMemAvailable:   {50 << 20} kB\n")
    monkeypatch.setattr(stats, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 120 << 30))
    card = SimpleNamespace(is_integrated=integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    assert free_memory(torch.device("cuda")) == free
    assert memory_stats(torch.device("cuda"))["vram"]["used"] == (120 << 30) - free


@pytest.mark.parametrize(("clear", "times"), [(True, 1), (False, 0)])
def test_cached_memory_is_released_after_an_out_of_memory_error(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, clear: bool, times: int
) -> None:
    core = EngineCore(tiny, EngineConfig(slots=2, guard=False, clear_on_oom=clear))
    released: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append("all"))
    launch = core.runner.launch

    def run_out_once(batch: object) -> object:
        monkeypatch.setattr(core.runner, "launch", launch)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(core.runner, "launch", run_out_once)
    for number in range(2):
        core.add(Utterance(number, build_turns("hello", None, tiny), SamplingParams(max_frames=3)))
    events = []
    while not core.idle:
        events += core.step()
    assert len(released) == times
    assert [event.error for event in events if event.last] == [None, None]


def test_repeated_out_of_memory_errors_lower_concurrency_and_all_requests_finish(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device holds two sequences, and eight are submitted."""
    core = EngineCore(tiny, EngineConfig(slots=8, guard=False))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    launch = core.runner.launch

    def run_small(batch: Batch) -> Callable[[], StepOutput]:
        if len(batch.sequences()) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(batch)

    monkeypatch.setattr(core.runner, "launch", run_small)
    for number in range(8):
        core.add(Utterance(number, build_turns("hello", None, tiny), SamplingParams(seed=number, max_frames=3)))
    events = []
    while not core.idle:
        events += core.step()
    assert [event.error for event in events if event.last] == [None] * 8
    assert core.stats.out_of_memory == core.stats.failed == 4  # eight, six, four, three
    assert core.scheduler.concurrency.limit == 2


def test_a_sequence_that_alone_runs_out_of_memory_fails(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(tiny, EngineConfig(slots=2, guard=False, backend="eager"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    launch = core.runner.launch

    def run_out(batch: Batch) -> Callable[[], StepOutput]:
        if any(sequence.id == 0 for sequence in batch.sequences()):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(batch)

    monkeypatch.setattr(core.runner, "launch", run_out)
    core.add(Utterance(0, build_turns("hello", None, tiny), SamplingParams(max_frames=3)))
    (event,) = core.step()
    assert isinstance(event.error, GenerationFailed)
    assert core.idle
