"""The plain-graph backend runs the eager operators at fixed sizes; on a CPU they run without a graph."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.execution.plain_graphs import PlainFrame, PlainGraphRunner
from shoal.engine.execution.retry import FIRST_SECONDS
from shoal.engine.execution.runner import PipelinedRunner
from shoal.engine.utterance import Turn, Utterance
from shoal.kernels.attention.paged_attention import grouped_decode, grouped_prefill, paged_prefill_reference
from shoal.speech import SamplingParams
from tests.engine.clock import FakeClock
from tests.engine.execution.test_fallback import speak_all
from tests.host_reads import NoHostReads

WIDTHS = (32, 64)


def engine(
    checkpoint: Checkpoint,
    slots: int,
    *,
    kv_dtype: str = "auto",
    token_budget: int = 512,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """Return an engine on the plain-graph backend with sizes so small that a few tokens use all of them."""
    config = EngineConfig(
        slots=slots, guard=False, kv_bytes=1 << 22, kv_dtype=kv_dtype, token_budget=token_budget, backend="plain-graph"
    )
    core = EngineCore(checkpoint, config, clock)
    assert core.runner.backend == "plain-graph"
    runner = PlainGraphRunner(core.runner._eager, capture=False, buckets=(1, 2, 8), widths=WIDTHS, prompts=(4, 16))
    core.runner.runner = PipelinedRunner(runner, 0)
    core.runner._built["plain-graph"] = runner
    return core


def utterances(checkpoint: Checkpoint, lengths: list[int], frames: int) -> list[Utterance]:
    config, rng = checkpoint.model.config, np.random.default_rng(0)
    made = []
    for number, length in enumerate(lengths):
        prompt = np.zeros((length, 1 + config.num_codebooks), np.int32)
        prompt[:, 0] = rng.integers(0, config.stop_id, length)
        sampling = SamplingParams(seed=number, max_frames=frames, repetition_penalty=1.0 + 0.2 * (number % 2))
        made.append(Utterance(number, [Turn("hm", prompt, prompt)], sampling))
    return made


def spoken(core: EngineCore, lengths: list[int], frames: int) -> list[np.ndarray]:
    made = utterances(core.checkpoint, lengths, frames)
    speak_all(core, made)
    return [each.all_codes() for each in made]


@pytest.mark.parametrize("family", ["tiny", "tiny_s2"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_codes_equal_the_eager_backend(request: pytest.FixtureRequest, family: str, kv_dtype: str) -> None:
    """Prompts in several chunks, contexts of different widths in one batch, more rows than a bucket."""
    checkpoint: Checkpoint = request.getfixturevalue(family)
    lengths = [3, 40, 29, 70, 5]
    config = EngineConfig(slots=5, guard=False, kv_bytes=1 << 22, kv_dtype=kv_dtype, backend="eager")
    expected = spoken(EngineCore(checkpoint, config), lengths, 2)
    actual = spoken(engine(checkpoint, 5, kv_dtype=kv_dtype, token_budget=24), lengths, 2)
    assert all(map(np.array_equal, actual, expected))


def test_one_long_context_does_not_widen_the_other_rows(tiny: Checkpoint) -> None:
    core = engine(tiny, 4)
    runner = core.runner.runner.launcher
    assert isinstance(runner, PlainGraphRunner)
    assert runner._next_group([5, 20, 30, 60]) == ((32, 4), 3)
    assert runner._next_group([60]) == ((64, 1), 1)


def test_nothing_is_read_by_the_host(tiny: Checkpoint, tiny_s2: Checkpoint) -> None:
    for checkpoint in (tiny, tiny_s2):
        runner = engine(checkpoint, 2).runner.runner.launcher
        assert isinstance(runner, PlainGraphRunner)
        for sizes in runner.graphs:
            workload = sizes[min(sizes)].workload
            with torch.inference_mode():
                workload.run()  # caches are allocated by the first run, outside the capture
                with NoHostReads() as mode:
                    workload.run()
            assert mode.calls > 50


@pytest.mark.parametrize(
    "read",
    [lambda x: x.sum().item(), lambda x: bool(x.any()), lambda _: torch.tensor([1]), lambda x: x[x > 0]],
    ids=["item", "bool", "tensor", "mask"],
)
def test_a_read_by_the_host_is_detected(read: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3)
    with NoHostReads(), pytest.raises(RuntimeError, match="captured"):
        read(x)


def test_grouped_attention_equals_attention_with_repeated_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((3, 8, 16), (3, 2, 5, 16), (3, 2, 5, 16)))
    mask = (torch.arange(5) < torch.tensor([1, 3, 5])[:, None])[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), attn_mask=mask
    )
    torch.testing.assert_close(grouped_decode(q, k, v, mask), expected[:, :, 0])


def test_grouped_prompts_equal_attention_with_repeated_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((3, 8, 16), (1, 2, 5, 16), (1, 2, 5, 16)))
    mask = torch.ones(3, 5, dtype=torch.bool).tril(2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), attn_mask=mask
    )
    torch.testing.assert_close(grouped_prefill(q, k, v, mask), expected[0].transpose(0, 1))


class GroupedCalls(TorchFunctionMode):
    """Counts attention calls, and those that leave the grouping of heads to the operator."""

    def __init__(self) -> None:
        self.calls = self.grouped = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.calls += 1
            self.grouped += bool((kwargs or {}).get("enable_gqa"))
        return function(*args, **(kwargs or {}))


def test_prompts_on_a_gpu_never_store_the_scores_of_a_whole_context() -> None:
    """With a mask and grouped heads most GPUs have no other implementation than one that stores them."""
    q, keys = torch.empty(512, 32, 128, device="meta"), torch.empty(64, 16, 8, 128, device="meta")
    table = torch.zeros(64, dtype=torch.long, device="meta")
    with GroupedCalls() as mode:
        assert paged_prefill_reference(q, keys, keys, table, 1024).shape == q.shape
    assert (mode.calls, mode.grouped) == (1, 0)


class Failing:
    """Makes frames of some numbers of rows raise, at most `times` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: set[int], times: int = 1_000) -> None:
        self.rows, self.times, run = rows, times, PlainFrame.run

        def run_or_fail(workload: PlainFrame) -> None:
            if workload.inputs.shape[1] in self.rows and self.times:
                self.times -= 1
                raise ValueError("out of resource: shared memory")
            run(workload)

        monkeypatch.setattr(PlainFrame, "run", run_or_fail)


LENGTHS = [3, 9, 5]


@pytest.fixture(scope="module")
def expected(tiny: Checkpoint) -> list[np.ndarray]:
    return spoken(EngineCore(tiny, EngineConfig(slots=3, guard=False, backend="eager")), LENGTHS, 3)


def test_a_size_that_fails_in_service_is_left_out_and_tried_again_later(
    tiny: Checkpoint, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    core = engine(tiny, 3, clock=clock)
    speak_all(core, utterances(tiny, [3], 1))  # a step succeeds before one fails
    failing = Failing(monkeypatch, {3})
    assert all(map(np.array_equal, spoken(core, LENGTHS, 3), expected))
    assert core.runner.backend == "plain-graph"
    assert core.stats.failed == 1
    assert "(32, 3)" in core.runner.dropped[0]
    assert "shared memory" in core.runner.dropped[0]
    failing.rows, clock.now = set(), clock.now + FIRST_SECONDS
    assert all(map(np.array_equal, spoken(core, LENGTHS, 3), expected))
    assert core.runner.dropped == []


def test_a_size_that_fails_again_after_the_retry_does_not_cost_the_backend(
    tiny: Checkpoint, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    core = engine(tiny, 3, clock=clock)
    speak_all(core, utterances(tiny, [3], 1))
    Failing(monkeypatch, {3})
    for retry in range(3):  # the first step with three rows after each retry fails
        assert all(map(np.array_equal, spoken(core, LENGTHS, 3), expected))
        assert core.stats.failed == 1 + retry
        assert core.runner.backend == "plain-graph"
        assert len(core.runner.dropped) == 1
        clock.now += FIRST_SECONDS * 2**retry


def test_a_backend_that_fails_in_service_is_tried_again_later(
    tiny: Checkpoint, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    core = engine(tiny, 3, clock=clock)
    failing = Failing(monkeypatch, {1, 2, 3})
    for retry in range(2):  # fails again after the first retry
        assert all(map(np.array_equal, spoken(core, LENGTHS, 3), expected))
        assert core.runner.backend in ("native", "eager")
        assert "shared memory" in core.runner.reasons["plain-graph"]
        clock.now += FIRST_SECONDS * (retry + 1)
    failing.rows = set()
    assert all(map(np.array_equal, spoken(core, LENGTHS, 3), expected))
    assert core.runner.backend == "plain-graph"
    assert core.runner.reasons == {}
    assert core.runner.dropped == []


def test_contexts_whose_sizes_were_left_out_run_on_the_next_backend_and_the_reason_says_so(tiny: Checkpoint) -> None:
    core = engine(tiny, 2)
    runner = core.runner.runner.launcher
    assert isinstance(runner, PlainGraphRunner)
    for size in [size for size in runner._frames if size[0] > WIDTHS[0]]:
        runner._frames._drop(size, RuntimeError("out of memory"))
    spoken(core, [WIDTHS[0] + 1], 1)
    assert core.runner.backend in ("native", "eager")
    assert "every plain frame graph for a context of 33 tokens has failed" in core.runner.reasons["plain-graph"]


def test_sizes_that_cannot_be_built_are_left_out_and_others_serve_their_batches(
    tiny: Checkpoint, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(tiny, 3)
    Failing(monkeypatch, {2, 3})
    runner = core.runner.runner.launcher
    assert isinstance(runner, PlainGraphRunner)
    runner._frames.build(None)
    assert {rows for _, rows in runner._frames} == {1}
    assert all(map(np.array_equal, spoken(core, LENGTHS, 3), expected))
    assert core.stats.failed == 0


def test_a_backend_without_any_size_is_not_built(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine(tiny, 2).runner.runner.launcher
    assert isinstance(runner, PlainGraphRunner)
    Failing(monkeypatch, {1, 2})
    with pytest.raises(RuntimeError, match=r"no size of plain frame graph works.*shared memory"):
        runner._frames.build(None)


def test_a_device_without_doubles_or_grouped_attention_samples_the_same_codes(
    tiny: Checkpoint, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disable operations that Apple's GPUs lack: float64 tensors, complex products, heads that share keys."""
    monkeypatch.setattr("shoal.kernels.attention.grouped_attention.has_grouped_operator", lambda device: False)
    monkeypatch.setattr("shoal.kernels.rope.has_complex", lambda device: False)
    core = EngineCore(tiny, EngineConfig(slots=3, guard=False, backend="eager"))
    core.runner._eager.slots.has_float64 = False
    assert all(map(np.array_equal, spoken(core, LENGTHS, 3), expected))
