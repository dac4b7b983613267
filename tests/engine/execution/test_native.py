"""The native backend: the frames of the eager path, the same bits however a prompt is chunked, and bounded inputs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import random_checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.execution.native import NativeRunner
from shoal.engine.utterance import Turn, Utterance
from shoal.errors import InvalidRequest
from shoal.model.generate import generate
from shoal.model.slow import Head
from shoal.native.choice import candidates
from shoal.native.dual_ar import StepRows
from shoal.native.library import NativeUnavailable, open_library
from shoal.quantize.apply import prepare_model
from shoal.quantize.modes import WeightModes
from shoal.speech import SamplingParams
from tests.engine.oracle import Received, StepDriver


@pytest.fixture(autouse=True)
def available() -> None:
    try:
        open_library()
    except NativeUnavailable as error:
        pytest.skip(f"no native library: {error}")


@pytest.fixture(params=["s1", "s2"])
def model(request: pytest.FixtureRequest, tiny: Checkpoint, tiny_s2: Checkpoint) -> Checkpoint:
    return tiny if request.param == "s1" else tiny_s2


def core_of(checkpoint: Checkpoint, **changes: object) -> EngineCore:
    config = replace(EngineConfig(slots=4, guard=False, kv_bytes=1 << 20), **changes)  # type: ignore[arg-type]
    return EngineCore(checkpoint, config)


def prompt(checkpoint: Checkpoint, number: int) -> np.ndarray:
    """Return a prompt of text tokens and of audio tokens."""
    config, rng = checkpoint.model.config, np.random.default_rng(number)
    grid = np.zeros((20 + number, 1 + config.num_codebooks), np.int32)
    grid[:, 0] = rng.integers(0, config.semantic_begin_id, len(grid))
    audio = grid[5:12]
    audio[:, 1:] = rng.integers(0, config.residual_size, (7, config.num_codebooks))
    audio[:, 0] = config.semantic_begin_id + audio[:, 1]
    return grid


SETTINGS = (
    SamplingParams(seed=3, max_frames=24, repetition_penalty=1.4),
    SamplingParams(seed=4, max_frames=24, repetition_penalty=1.4, repetition="window"),
    SamplingParams(seed=5, max_frames=24, temperature=0.3, top_p=0.5),
    SamplingParams(seed=6, max_frames=24, top_k=4),
)


def speak(core: EngineCore, checkpoint: Checkpoint, numbers: list[int]) -> list[np.ndarray]:
    utterances = []
    for number in numbers:
        grid = prompt(checkpoint, number)
        utterances.append(Utterance(number, [Turn("hm", grid, grid)], SETTINGS[number]))
        core.add(utterances[-1])
    while not core.idle:
        core.step()
    return [each.all_codes() for each in utterances]


def test_frames_equal_the_reference_generation(model: Checkpoint) -> None:
    core = core_of(model)
    assert core.runner.backend == "native"
    spoken = speak(core, model, [0, 1, 2, 3])
    assert core.runner.backend == "native"
    for number, codes in enumerate(spoken):
        grid = torch.from_numpy(prompt(model, number).T.copy())
        expected = generate(model.model, Head(model.model.slow), grid, SETTINGS[number]).codes
        assert np.array_equal(codes, expected.numpy())


def hear(checkpoint: Checkpoint, numbers: list[int], *, whole: bool) -> list[Received]:
    driver, received = StepDriver(core_of(checkpoint, first_chunk_frames=1)), []
    for number in numbers:
        grid = prompt(checkpoint, number)
        received.append(driver.add(Utterance(number, [Turn("hm", grid, grid)], SETTINGS[number], whole=whole)))
    driver.run()
    assert (driver.core.runner.backend, driver.core.audio_decoder.backend) == ("native", "native")
    return received


def test_streams_of_a_batch_have_the_bits_of_complete_responses_alone(model: Checkpoint) -> None:
    together = hear(model, [0, 1, 2, 3], whole=False)
    assert sum(len(streamed.chunks) for streamed in together) > len(together)
    for number, streamed in enumerate(together):
        [alone] = hear(model, [number], whole=True)
        assert len(alone.chunks) == 1
        assert np.array_equal(streamed.codes, alone.codes)
        assert np.array_equal(streamed.samples, alone.samples)


@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_other_instruction_sets_sample_the_same_frames(tiny: Checkpoint, isa: str) -> None:
    if not open_library().shoal_supports(isa.encode()):
        pytest.skip(f"this CPU has no {isa}")
    core = core_of(tiny, cpu_isa=isa)
    assert core.runner.backend == "native"
    assert all(map(np.array_equal, speak(core, tiny, [0, 3]), speak(core_of(tiny), tiny, [0, 3])))


def test_keys_and_values_have_the_same_bits_however_the_prompt_is_chunked(model: Checkpoint) -> None:
    grids = {}
    for budget in (512, 7, 1):
        core = core_of(model, token_budget=budget)
        speak(core, model, [2])
        table = core.scheduler.tables[0]
        grids[budget] = core.runner._eager.kv.keys[:, table[:2]].clone()
    assert grids[512].abs().sum() > 0
    assert torch.equal(grids[512], grids[7])
    assert torch.equal(grids[512], grids[1])


def native_runner(core: EngineCore) -> NativeRunner:
    launcher = core.runner.runner.launcher
    assert isinstance(launcher, NativeRunner)
    return launcher


@pytest.fixture
def runner(tiny: Checkpoint) -> NativeRunner:
    return native_runner(core_of(tiny))


@pytest.mark.parametrize(
    ("token", "slot", "position"),
    [((10**9, 0), 0, 0), ((-1, 0), 0, 0), ((0, 10**6), 0, 0), ((0, -5), 0, 0), ((0, 0), 99, 0), ((0, 0), 0, 10**6)],
)
def test_values_out_of_range_are_an_error_and_read_no_other_memory(
    runner: NativeRunner, token: tuple[int, int], slot: int, position: int
) -> None:
    tokens = np.zeros((1, runner.steps.model.width), np.int64)
    tokens[0, :2] = token
    rows = StepRows(tokens, np.array([slot], np.int32), np.array([position], np.int32), np.zeros(1, np.int32))
    with pytest.raises(RuntimeError, match="out of range"):
        runner.steps.model.step(runner.steps.state, rows)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_quantized_kv_cache_is_refused_unless_the_eager_backend_is_asked_for(tiny: Checkpoint, kv_dtype: str) -> None:
    for backend in ("auto", "native"):
        with pytest.raises(InvalidRequest, match=f"kv_dtype = '{kv_dtype}' is not supported by the native backend"):
            core_of(tiny, kv_dtype=kv_dtype, backend=backend)
    assert core_of(tiny, kv_dtype=kv_dtype, backend="eager").runner.backend == "eager"


@pytest.fixture(scope="module")
def w8a8() -> Checkpoint:
    checkpoint = random_checkpoint("tiny", dtype=torch.float32)
    prepare_model(checkpoint.model, WeightModes.parse("w8a8"))
    return checkpoint


def test_int8_activations_sample_the_same_frames_alone_in_a_batch_and_on_every_instruction_set(
    w8a8: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    expected = speak(core_of(w8a8), w8a8, [0, 1, 2, 3])
    assert all(each.shape[1] > 1 for each in expected)
    for isa in candidates(int8_activations=True):
        core = core_of(w8a8, cpu_isa=isa, token_budget=7)
        assert core.runner.backend == "native"
        assert core.runner.native_context is not None
        assert core.runner.native_context.isa == isa
        for number in (0, 3):
            assert np.array_equal(speak(core, w8a8, [number])[0], expected[number]), isa
    assert "not available" not in caplog.text


def test_int8_activations_give_the_keys_of_the_eager_fallback(w8a8: Checkpoint) -> None:
    keys = {}
    for backend in ("native", "eager"):
        core, grid = core_of(w8a8, backend=backend), prompt(w8a8, 2)
        core.add(Utterance(0, [Turn("hm", grid, grid)], SamplingParams(seed=1, max_frames=1)))
        while not core.idle:
            core.step()
        keys[backend] = core.runner._eager.kv.keys[:, core.scheduler.tables[0][:1]].clone()
    difference = (keys["native"] - keys["eager"]).abs().max()
    assert difference < 0.05 * keys["eager"].abs().max()
