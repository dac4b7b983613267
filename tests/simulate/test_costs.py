import json
from pathlib import Path
from typing import Any

import pytest

from shoal.config import EngineConfig
from shoal.errors import InvalidRequest
from shoal.simulate.costs import Curve, chunks_of, fit, read_costs

STEP, COLUMN, CHUNK, FRAME = 0.010, 0.002, 0.004, 0.001
LENGTH = 42  # frames of an utterance, which the engine sends in eight chunks


def row(voices: int, **changed: Any) -> dict[str, Any]:
    """As of a machine whose steps take 10 ms and 1 ms per frame, and whose chunks take 4 ms and 1 ms per frame."""
    utterances, steps = 3 * voices, 3 * LENGTH
    frames, chunks = utterances * LENGTH, utterances * len(chunks_of(LENGTH, EngineConfig()))
    # With more voices than one, decoding them together takes half of what it takes apart.
    model, codec = steps * (STEP + 0.001 * voices), (CHUNK * chunks + FRAME * frames) * (1.0 if voices == 1 else 0.5)
    times = {"seconds": model + codec, "model_seconds": model, "codec_seconds": codec}
    counts = {"policy": "continuous", "voices": voices, "steps": steps, "frames": frames, "utterances": utterances}
    return counts | times | {"audio_seconds": frames / 20} | changed


FIRST = 2 * (STEP + 0.001) + CHUNK + 2 * FRAME  # two steps, and the first chunk
DOCUMENT = {
    "model": "random:tiny",
    "machine": {"device": "cpu"},
    "throughput": [row(16), row(1), row(4), row(4, policy="static", seconds=99.0)],
    "first_audio": {
        "prompt_columns": 220,
        "unknown": {"seconds": FIRST + 220 * COLUMN, "columns_saved": 0.0},
        "known": {"seconds": FIRST + 20 * COLUMN, "columns_saved": 200.0},
    },
}


def test_costs_are_those_of_the_machine_that_was_measured() -> None:
    costs = fit(DOCUMENT)
    for frames in (1, 2, 4, 10, 16, 32):
        assert costs.of_step(frames, 0) == pytest.approx(STEP + 0.001 * frames)
    assert costs.of_step(1, 100) == pytest.approx(STEP + 0.001 + 100 * COLUMN)
    assert costs.of_decoding(1, 10, running=1) == pytest.approx(CHUNK + 10 * FRAME)
    assert costs.of_decoding(3, 30, running=8) == pytest.approx((3 * CHUNK + 30 * FRAME) / 2)
    assert costs.frame_rate == 20
    assert costs.source == "random:tiny on cpu"


def test_chunks_grow_with_what_has_been_sent() -> None:
    chunks = chunks_of(200, EngineConfig())
    assert chunks[:6] == [2, 2, 2, 3, 4, 6]
    assert max(chunks) == EngineConfig.max_chunk_frames
    assert sum(chunks) == 200


def test_a_curve_is_straight_between_its_points_and_flat_before_them() -> None:
    curve = Curve(((2, 1.0), (4, 3.0), (8, 3.0)))
    assert [curve.at(batch) for batch in (1, 2, 3, 4, 6, 100)] == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("broken", ["{", "[]", "{}", json.dumps({**DOCUMENT, "throughput": []})])
def test_a_file_that_is_no_benchmark_is_refused(tmp_path: Path, broken: str) -> None:
    (tmp_path / "bench.json").write_text(broken)
    with pytest.raises(InvalidRequest, match=r"bench\.json"):
        read_costs(tmp_path / "bench.json")
