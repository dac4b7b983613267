import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import random_checkpoint
from shoal.config import EngineConfig
from shoal.engine.budget import Budget, parse_cap, plan_memory, rehearse, with_few_blocks
from shoal.engine.core import EngineCore
from shoal.engine.load import load
from shoal.errors import InvalidRequest
from tests.engine.solo import assert_nothing_is_held

TOTAL = 24 * 10**9


@pytest.mark.parametrize(
    ("text", "bytes"),
    [("0.9", 21.6e9), ("1", TOTAL), (".5", 12e9), ("4GB", 4e9), ("4 gb", 4e9), ("2GiB", 2 << 30), ("500MB", 5e8),
     ("3000000000", 3e9)],
)  # fmt: skip
def test_a_cap_is_a_share_or_a_size(text: str, bytes: float) -> None:
    assert parse_cap(text, TOTAL) == int(bytes)


@pytest.mark.parametrize("text", ["", "a lot", "-1", "4 TB", "90%", "1e9GB", "nan"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"neither a share such as 0\.9 nor a size such as 4GB"):
        parse_cap(text, TOTAL)


@pytest.mark.parametrize("text", ["3", "90"])
def test_a_number_that_is_too_large_for_a_share_and_too_small_for_a_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="lacks a unit"):
        parse_cap(text, TOTAL)


@pytest.mark.parametrize("text", ["0", "0GB", "25GB"])
def test_more_than_there_is_or_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"this device has 24\.0 GB"):
        parse_cap(text, TOTAL)


def test_a_cap_that_means_nothing_is_refused_without_a_gpu_too() -> None:
    with pytest.raises(InvalidRequest, match="gpu_memory = 'banana'"):
        load("random:tiny", device="cpu", config=EngineConfig(gpu_memory="banana"))


def test_what_everything_else_leaves_is_for_keys_and_values() -> None:
    budget = Budget(cap=10_000, needed=6_000, outside=500)
    assert budget.for_kv == 9_900 - 6_500


def test_a_rehearsal_needs_hardly_any_memory_and_leaves_no_trace(tiny: Checkpoint) -> None:
    core = EngineCore(tiny, with_few_blocks(tiny, EngineConfig(slots=3)))
    assert core.pool.count == 8
    rehearse(core)
    assert_nothing_is_held(core)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_an_engine_stays_under_its_cap_with_all_its_voices_speaking(kv_dtype: str) -> None:
    checkpoint = random_checkpoint("tiny", device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        config = plan_memory(checkpoint, EngineConfig(slots=4, gpu_memory="1GB", kv_dtype=kv_dtype, guard=False))
        assert config.kv_bytes is not None
        rehearse(EngineCore(checkpoint, config))
        assert torch.cuda.max_memory_reserved() <= 1e9
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert total > 1e9


@pytest.mark.gpu
def test_a_cap_that_holds_nothing_says_what_to_do() -> None:
    checkpoint = random_checkpoint("tiny", device="cuda")
    try:
        with pytest.raises(InvalidRequest, match="lower slots, quantise"):
            plan_memory(checkpoint, EngineConfig(slots=64, gpu_memory="20MB", guard=False))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
