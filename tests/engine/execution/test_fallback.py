"""All backends give the same frames, and a failing backend fails no request."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore, codec_backends
from shoal.engine.execution.fallback import Backend, best_backend, parse_backend
from shoal.engine.execution.fused import FusedFrame, FusedPrefill
from shoal.engine.execution.graphs import FusedRunner
from shoal.engine.execution.runner import PipelinedRunner
from shoal.engine.load import slow_backends
from shoal.engine.scheduling.scheduler import Batch
from shoal.engine.utterance import Turn, Utterance
from shoal.errors import InvalidRequest, describe_error
from shoal.kernels.cuda_graph import to_host
from shoal.model.generate import generate
from shoal.model.slow import Head
from shoal.native.library import NativeUnavailable
from shoal.quantize.apply import quantize_model
from shoal.quantize.modes import WeightModes
from shoal.speech import SamplingParams
from tests.engine.oracle import run_with_lag

FRAMES = 2


def utterance(number: int, width: int, stop: int) -> Utterance:
    prompt = np.zeros((3 + number, width), np.int32)
    prompt[:, 0] = np.arange(3 + number) % stop
    sampling = SamplingParams(seed=number, max_frames=FRAMES, repetition_penalty=1.2)
    return Utterance(number, [Turn("hm", prompt, prompt)], sampling)


def speak_all(core: EngineCore, utterances: list[Utterance]) -> None:
    for each in utterances:
        core.add(each)
    for _ in range(100):
        if core.idle:
            return
        core.step()
    raise AssertionError("the engine does not come to an end")


def expected(checkpoint: Checkpoint, each: Utterance) -> np.ndarray:
    prompt = torch.from_numpy(each.turns[0].prompt.T.copy())
    codes = generate(checkpoint.model, Head(checkpoint.model.slow), prompt, each.sampling).codes
    return codes.numpy().astype(np.int32)


def some(checkpoint: Checkpoint, count: int) -> list[Utterance]:
    config = checkpoint.model.config
    return [utterance(number, 1 + config.num_codebooks, config.stop_id) for number in range(count)]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under the interpreter, on the CPU")
def test_fused_frames_equal_the_eager_path(tiny: Checkpoint) -> None:
    pytest.importorskip("triton")
    core = EngineCore(tiny, EngineConfig(slots=2, guard=False, backend="fused", kv_bytes=1 << 20))
    assert core.runner.backend == "fused"
    utterances = some(tiny, 2)
    speak_all(core, utterances)
    for each in utterances:
        assert np.array_equal(each.all_codes(), expected(tiny, each))


def with_fallback(checkpoint: Checkpoint) -> EngineCore:
    """Return an engine whose eager runner is taken for the plain-graph backend, so that it has a fallback."""
    core = EngineCore(checkpoint, EngineConfig(slots=3, guard=False, backend="eager"))
    core.runner._candidates, core.runner.backend = ("plain-graph", "eager"), "plain-graph"
    core.runner._built["plain-graph"] = core.runner._eager
    return core


class Broken:
    """A backend that works once and then always fails."""

    def __init__(self, kind: type[Exception], works: int = 1) -> None:
        self.left, self.kind = works, kind

    def wrap(self, core: EngineCore) -> None:
        below = core.runner.runner
        works = below.launch

        def launch(batch: Batch) -> None:
            self.left -= 1
            if self.left < 0:
                raise self.kind("device-side assert")
            works(batch)

        below.launch = launch  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [RuntimeError, IndexError])
def test_a_failing_backend_falls_back_and_every_request_finishes(tiny: Checkpoint, kind: type[Exception]) -> None:
    core = with_fallback(tiny)
    Broken(kind).wrap(core)
    utterances = some(tiny, 3)
    speak_all(core, utterances)
    assert core.runner.backend == "eager"
    assert core.stats.failed == 1
    for each in utterances:
        assert np.array_equal(each.all_codes(), expected(tiny, each))


@pytest.mark.parametrize("kind", [RuntimeError, ImportError, IndexError, ValueError])
def test_a_backend_that_cannot_be_built_is_skipped(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise kind("no such device")

    monkeypatch.setattr(FusedRunner, "__init__", refuse)
    monkeypatch.setattr("shoal.engine.execution.fallback.PlainGraphRunner", refuse)
    monkeypatch.setattr("shoal.engine.execution.fallback.NativeRunner", refuse)
    core = EngineCore(tiny, EngineConfig(slots=2, guard=False, backend="graph"))
    assert core.runner.backend == "eager"


def test_padding_rows_use_the_spare_slot_and_block(tiny: Checkpoint) -> None:
    """Graphs are captured with padding rows, which may not touch slots or blocks of sequences."""
    core = EngineCore(tiny, EngineConfig(slots=2, guard=False, backend="fused", kv_bytes=1 << 20))
    runner = core.runner.runner
    assert isinstance(runner.launcher, FusedRunner)
    assert runner.launcher._frames[2].workload.padding().tolist() == [[2, 2], [0, 0]]
    assert set(runner.launcher._tables.target.flatten().tolist()) == {core.pool.count}


def test_there_is_a_graph_for_every_configured_bucket_up_to_the_slots(tiny: Checkpoint) -> None:
    config = EngineConfig(slots=4, guard=False, backend="fused", kv_bytes=1 << 20, buckets=(1, 3, 64))
    launcher = EngineCore(tiny, config).runner.runner.launcher
    assert isinstance(launcher, FusedRunner)
    assert list(launcher._frames) == [1, 3, 4]


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, AssertionError])
def test_a_fused_size_that_fails_at_start_is_left_out_and_the_others_are_built(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def run(workload: FusedFrame) -> None:
        if workload.inputs.shape[1] == 2:
            raise kind("out of memory")

    monkeypatch.setattr(FusedFrame, "run", run)
    monkeypatch.setattr(FusedPrefill, "run", lambda workload: None)
    core = EngineCore(tiny, EngineConfig(slots=4, guard=False, backend="eager", kv_bytes=1 << 20))
    runner = FusedRunner(core.runner._eager, Head(tiny.model.slow), capture=False, check=True, prompts=(32,))
    assert list(runner._frames) == [1, 4]
    assert runner.dropped == [f"frame graph 2: {kind.__name__}: out of memory"]


@pytest.mark.parametrize("lag", [1, 2])
def test_a_lagging_device_gives_the_same_output(tiny: Checkpoint, lag: int) -> None:
    core = EngineCore(tiny, EngineConfig(slots=2, guard=False))
    run_with_lag(core, lag)
    utterances = some(tiny, 5)
    speak_all(core, utterances)
    for each in utterances:
        assert np.array_equal(each.all_codes(), expected(tiny, each))


def test_steps_in_flight_are_recomputed_after_a_fallback(tiny: Checkpoint) -> None:
    core = with_fallback(tiny)
    core.runner.runner = PipelinedRunner(core.runner._eager, 1)
    Broken(RuntimeError, works=2).wrap(core)
    utterances = some(tiny, 3)
    speak_all(core, utterances)
    assert core.runner.backend == "eager"
    for each in utterances:
        assert np.array_equal(each.all_codes(), expected(tiny, each))


def test_a_cpu_without_a_native_library_runs_eager_and_says_why(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NativeUnavailable("no C++ compiler found")

    monkeypatch.setattr("shoal.engine.execution.fallback.NativeRunner", refuse)
    assert EngineCore(tiny, EngineConfig(slots=2, guard=False)).runner.backend == "eager"
    assert "backend native is not available, using eager: no C++ compiler found" in caplog.text


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="warp"):
        parse_backend("warp")


def on_gpu(backend: str, codec: str, *, setting: str = "auto", reasons: dict[str, str] | None = None) -> EngineCore:
    """Return what `slow_backends` reads of an engine on a GPU."""
    runner = SimpleNamespace(backend=backend, reasons=reasons or {}, dropped=[])
    return SimpleNamespace(  # type: ignore[return-value]
        runner=runner,
        audio_decoder=SimpleNamespace(backend=codec, reasons={}, dropped=[]),
        checkpoint=SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda"))),
        config=EngineConfig(backend=setting),
    )


def test_the_warning_about_a_gpu_without_graphs_has_the_reason_and_the_remedy() -> None:
    warning = slow_backends(on_gpu("plain-graph", "graph", reasons={"graph": "Triton is not installed"}))
    assert warning is not None
    assert "the model runs on plain-graph instead of graph (Triton is not installed)" in warning
    assert "shoal doctor" in warning
    assert "codec" not in warning


def test_the_remedy_for_graphs_without_memory_is_more_memory() -> None:
    core = on_gpu("graph", "graph")
    core.runner.dropped.append(f"frame graph 64: {describe_error(torch.OutOfMemoryError('CUDA out of memory'))}")
    warning = slow_backends(core) or ""
    assert "CUDA out of memory): slower but correct; lower `slots`, or use smaller weights" in warning
    assert "doctor" not in warning


@pytest.mark.parametrize("core", [on_gpu("graph", "graph"), on_gpu("eager", "eager", setting="eager")])
def test_no_warning_on_graphs_or_on_a_backend_that_was_asked_for(core: EngineCore) -> None:
    assert slow_backends(core) is None


def test_sizes_that_are_left_out_are_part_of_the_warning() -> None:
    core = on_gpu("graph", "graph")
    core.runner.dropped.append("frame graph 64: OutOfResources: shared memory")
    assert "1 size is left out (frame graph 64: OutOfResources" in (slow_backends(core) or "")


@pytest.mark.parametrize(
    ("first", "kernels", "quantize", "expected"),
    [
        (None, True, "none", ["graph", "plain-graph", "eager"]),
        ("fused", True, "none", ["graph", "plain-graph", "eager"]),
        (None, False, "none", ["plain-graph", "eager"]),
        (None, True, "codec=int8", ["plain-graph", "eager"]),
        ("plain-graph", True, "none", ["plain-graph", "eager"]),
        ("eager", True, "none", ["eager"]),
    ],
)
def test_the_codec_chooses_its_backend_separately(
    monkeypatch: pytest.MonkeyPatch, first: Backend | None, kernels: bool, quantize: str, expected: list[str]
) -> None:
    monkeypatch.setattr("shoal.engine.core.kernels_unavailable", lambda device: None if kernels else "no Triton")
    monkeypatch.setattr("shoal.engine.core.modes_of", lambda model, codec: WeightModes.parse(quantize))
    checkpoint = SimpleNamespace(model=None, codec=SimpleNamespace(device=torch.device("cuda")))
    assert codec_backends(checkpoint, first) == expected  # type: ignore[arg-type]


def test_quantized_layers_without_kernels_refuse_the_fused_backends(tiny: Checkpoint) -> None:
    model = copy.deepcopy(tiny.model)
    quantize_model(model, WeightModes.parse("int4"))
    core = EngineCore(replace(tiny, model=model), EngineConfig(slots=2, guard=False, backend="graph"))
    assert core.runner.backend == "plain-graph"
    assert core.runner.reasons["graph"] == "RuntimeError: int4 weights have no fused kernels"


def test_an_apple_gpu_runs_pytorch_operators_and_its_results_are_copied_to_the_host() -> None:
    device = torch.device("mps")
    assert best_backend(Mock(model=Mock(device=device))) == "eager"
    results = Mock(device=device)
    assert to_host(results) is results.to.return_value
    results.to.assert_called_once_with("cpu", copy=True)
