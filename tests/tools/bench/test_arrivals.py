import numpy as np
import pytest
import torch

from shoal.checkpoint.random import random_checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.preprocess import build_turns
from shoal.engine.utterance import Utterance
from shoal.errors import GenerationFailed
from shoal.speech import SamplingParams
from shoal.tools.bench.arrivals import measure_arrivals
from shoal.tools.bench.busy import union_length


@pytest.fixture(scope="module")
def core() -> EngineCore:
    checkpoint = random_checkpoint("tiny", dtype=torch.float32, device="cpu")
    return EngineCore(checkpoint, EngineConfig(slots=2, guard=False))


def utterances(core: EngineCore, count: int, **limits: float) -> list[Utterance]:
    turns = build_turns("A word or two.", None, core.checkpoint)
    return [
        Utterance(number, turns, SamplingParams(seed=number, max_frames=12), **limits)  # type: ignore[arg-type]
        for number in range(count)
    ]


def test_all_arrivals_complete_even_beyond_the_number_of_slots(core: EngineCore) -> None:
    found = measure_arrivals(core, utterances(core, 5), rate=1000.0)
    assert core.idle
    assert found["requests"] == found["first_audio"]["count"] == 5
    assert 0 < found["first_audio"]["min"] <= found["first_audio"]["p95"] <= found["seconds"]
    assert 0 <= found["starved"] <= 5
    kv = found["kv"]
    longest, size = core.checkpoint.model.config.slow.max_seq_len, core.pool.size
    assert 0 < kv["running"] <= 2
    assert kv["static"] == kv["running"] * longest
    # Every sequence holds at most one block and a token more than it uses; shared blocks count once.
    assert 0 < kv["blocks"] <= kv["used"] + kv["running"] * (size + 1)


def test_the_measurement_lasts_until_the_last_arrival(core: EngineCore) -> None:
    found = measure_arrivals(core, utterances(core, 4), rate=50.0, seed=3)
    assert found["seconds"] > np.random.default_rng(3).exponential(1 / 50.0, 4).sum()


def test_a_request_that_fails_ends_the_measurement(core: EngineCore) -> None:
    with pytest.raises(GenerationFailed, match="benchmark failed"):
        measure_arrivals(core, utterances(core, 1, deadline=-1.0), rate=1000.0)


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(1, 3)], 2), ([(4, 5), (1, 3)], 3), ([(1, 4), (2, 3), (3, 6)], 5), ([(1, 2), (1, 5), (2, 2)], 4)],
)
def test_overlapping_spans_count_once(spans: list[tuple[float, float]], length: float) -> None:
    assert union_length(spans) == length
