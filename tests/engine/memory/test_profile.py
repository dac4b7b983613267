import copy
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import random_checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore, block_bytes
from shoal.engine.load import build_core, load
from shoal.engine.memory import profile, stats
from shoal.engine.memory.profile import (
    MIN_SLOT_TOKENS,
    SLACK,
    MemoryBudget,
    SlotsDoNotFit,
    measure,
    minimal_kv_config,
    plan_memory,
    run_peak_load,
)
from shoal.errors import GenerationFailed, InvalidRequest
from shoal.quantize.apply import quantize_model
from shoal.quantize.modes import WeightModes
from tests.engine.oracle import assert_nothing_leaked

# The memory of the other processes on the GPU is a part of what these tests measure.
needs_whole_gpu = pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="measures the memory of the whole GPU: run with one worker (-n 0)",
)


def test_an_invalid_memory_limit_is_refused_without_a_gpu_too() -> None:
    with pytest.raises(InvalidRequest, match="gpu_memory = 'banana'"):
        load("random:tiny", device="cpu", config=EngineConfig(gpu_memory="banana"))


def test_the_kv_cache_gets_the_memory_that_is_left() -> None:
    budget = MemoryBudget(limit=10_000, needed=6_000, outside=500)
    assert budget.for_kv == 9_900 - 6_500


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 8 GB on which an engine needs 6 GB, and 1 GB more per slot."""

    def measured(checkpoint: Checkpoint, config: EngineConfig, limit: int, **_: bool) -> MemoryBudget:
        if config.slots > 8:
            raise SlotsDoNotFit("out of memory")
        return MemoryBudget(limit, (6 + config.slots) * 10**9, 0)

    monkeypatch.setattr(profile, "measure", measured)
    monkeypatch.setattr(profile, "device_memory_limit", lambda config, device: 8 * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 10**9, 8 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: None)


@pytest.mark.usefixtures("card")
def test_slots_that_do_not_fit_are_halved_with_a_warning(tiny: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    config = plan_memory(tiny, EngineConfig(slots=16))
    assert (config.slots, config.kv_bytes) == (1, 920_000_000)
    tried = [
        record.getMessage().partition("do not hold ")[2] for record in caplog.records if record.levelname == "WARNING"
    ]
    assert tried == [
        f"{slots} slots of {MIN_SLOT_TOKENS} tokens beside the weights; trying {slots // 2}" for slots in (16, 8, 4, 2)
    ]


@pytest.mark.usefixtures("card")
def test_slots_are_halved_until_each_has_room_for_a_request(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slot = MIN_SLOT_TOKENS * block_bytes(tiny, EngineConfig()) // EngineConfig.block_size
    left = {16: 15 * slot, 8: 7 * slot, 4: 4 * slot + 1}

    def measured(checkpoint: Checkpoint, config: EngineConfig, limit: int, **_: bool) -> MemoryBudget:
        return MemoryBudget(limit, int(limit * (1 - SLACK)) - left.get(config.slots, slot // 2), 0)

    monkeypatch.setattr(profile, "measure", measured)
    assert plan_memory(tiny, EngineConfig(slots=16)).slots == 4
    assert "room for only" not in caplog.text
    # One slot is kept with less, and the log says how much that is.
    assert plan_memory(tiny, EngineConfig(slots=2)).slots == 1
    assert f"room for only {MIN_SLOT_TOKENS // 2} tokens" in caplog.text


@pytest.mark.usefixtures("card")
def test_the_limit_of_a_gpu_that_shares_the_memory_of_the_host_includes_what_files_are_cached_in(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text(f"MemAvailable: {7 * 10**9 // 1024} kB\n")
    monkeypatch.setattr(stats, "MEMINFO", tmp_path / "meminfo")
    card = SimpleNamespace(total_memory=8 * 10**9, is_integrated=True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 8 * 10**9))
    limits = list[int]()

    def measured(checkpoint: Checkpoint, config: EngineConfig, limit: int, **_: bool) -> MemoryBudget:
        limits.append(limit)
        return MemoryBudget(limit, 10**9, 0)

    monkeypatch.setattr(profile, "measure", measured)
    plan_memory(tiny, EngineConfig(slots=1))
    assert limits == [pytest.approx(7 * 10**9 - stats.HOST_RESERVE, abs=1024)]


def test_the_advice_names_smaller_weights_only_if_there_are_any(tiny: Checkpoint) -> None:
    model = copy.deepcopy(tiny.model)
    assert "use smaller weights" in profile._advice(tiny)
    quantize_model(model, WeightModes("int4", "int8"))
    assert profile._advice(replace(tiny, model=model)).startswith("use a smaller model, raise gpu_memory")


@pytest.mark.usefixtures("card")
def test_a_card_that_holds_not_even_one_slot_is_refused_with_advice(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "measure", lambda checkpoint, config, limit, **_: MemoryBudget(limit, 9 * 10**9, 0))
    with pytest.raises(InvalidRequest, match=r"needs 9.0 GB without the KV cache.+use smaller weights"):
        plan_memory(tiny, EngineConfig(slots=4))


def test_the_peak_load_needs_few_blocks_and_leaves_no_state(tiny: Checkpoint) -> None:
    core = EngineCore(tiny, minimal_kv_config(tiny, EngineConfig(slots=3)))
    assert core.pool.count == 8
    run_peak_load(core)
    assert_nothing_leaked(core)


@pytest.mark.parametrize(("cause", "raised"), [(torch.OutOfMemoryError(), SlotsDoNotFit), (None, GenerationFailed)])
def test_a_codec_that_runs_out_of_memory_while_profiling_is_a_matter_of_settings(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, cause: Exception | None, raised: type[Exception]
) -> None:
    def failed(*_: object) -> None:
        if cause is not None:
            raise cause
        raise ValueError("broken")

    monkeypatch.setattr(profile, "_outside", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr("shoal.engine.output.audio_decoder.AudioDecoder._retryable", Exception)
    monkeypatch.setattr("shoal.engine.output.audio_decoder.AudioDecoder._run", failed)
    with pytest.raises(raised, match="use smaller weights" if cause else "the codec failed"):
        measure(tiny, EngineConfig(slots=2), 1 << 30)


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("record_weights", [False, True])
def test_the_engine_that_is_measured_reads_the_attention_as_the_engine_that_serves(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, record_weights: bool
) -> None:
    """Calibration reads all heads: the kernel of word times, which unrolls them, would compile for minutes."""
    built: list[bool] = []

    def out_of_memory(*_: object, record_weights: bool = False) -> None:
        built.append(record_weights)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(profile, "measure", measure)
    monkeypatch.setattr(profile, "EngineCore", out_of_memory)
    monkeypatch.setattr(profile, "_outside", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(type(tiny.model), "device", torch.device("cuda"))
    with pytest.raises(InvalidRequest, match="out of memory"):
        build_core(tiny, EngineConfig(slots=1), record_weights=record_weights)
    assert built == [record_weights]


@pytest.mark.gpu
@needs_whole_gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_an_engine_stays_within_its_memory_limit_at_full_load(kv_dtype: str) -> None:
    checkpoint = random_checkpoint("tiny", device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        config = plan_memory(checkpoint, EngineConfig(slots=4, gpu_memory="1GB", kv_dtype=kv_dtype, guard=False))
        assert config.kv_bytes is not None
        run_peak_load(EngineCore(checkpoint, config))
        assert torch.cuda.max_memory_reserved() <= 1e9
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert total > 1e9


@pytest.mark.gpu
@needs_whole_gpu
def test_a_memory_limit_that_is_too_small_is_refused_with_advice() -> None:
    checkpoint = random_checkpoint("tiny", device="cuda")
    try:
        with pytest.raises(InvalidRequest, match="use smaller weights"):
            plan_memory(checkpoint, EngineConfig(slots=64, gpu_memory="20MB", guard=False))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
