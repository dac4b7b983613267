import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InvalidRequest
from shoal.tools.bench.document import new_document
from shoal.tools.bench.machine import describe_client
from shoal.tools.simulate.costs import CostCurve, fit, read_costs

STEP, TOKEN, CALL, CHUNK, FRAME = 0.010, 0.002, 0.003, 0.004, 0.001
LENGTH = 42  # frames of an utterance


def decodes(voices: int) -> list[dict[str, Any]]:
    """Return calls for one chunk and for one per sequence, of two and of eight frames."""
    sizes = {(chunks, frames) for chunks in (1, voices) for frames in (2, 8)}
    return [
        {"chunks": chunks, "frames": frames, "calls": 5, "seconds": 5 * (CALL + chunks * (CHUNK + FRAME * frames))}
        for chunks, frames in sorted(sizes)
    ]


def row(voices: int, **changed: Any) -> dict[str, Any]:
    """Return a throughput row of a machine whose steps take 10 ms plus 1 ms per frame."""
    utterances, steps = 3 * voices, 3 * LENGTH
    frames, model, calls = utterances * LENGTH, steps * (STEP + 0.001 * voices), decodes(voices)
    codec = sum(each["seconds"] for each in calls)
    times = {"seconds": model + codec, "model_seconds": model, "codec_seconds": codec, "decodes": calls}
    counts = {"policy": "continuous", "voices": voices, "steps": steps, "frames": frames, "utterances": utterances}
    return counts | times | {"audio_seconds": frames / 20} | changed


FIRST = 2 * (STEP + 0.001) + CALL + CHUNK + 2 * FRAME  # two steps, and the first chunk
RUN = {
    "name": "random:tiny",
    "throughput": [row(16), row(1), row(4), row(4, policy="static", seconds=99.0)],
    "first_audio": {
        "prompt_tokens": 220,
        "unknown": {"seconds": FIRST + 220 * TOKEN, "tokens_saved": 0.0},
        "known": {"seconds": FIRST + 20 * TOKEN, "tokens_saved": 200.0},
    },
}
DOCUMENT = {"machine": {"device": "cpu"}, "runs": [RUN]}


def test_fitted_costs_equal_those_of_the_measured_machine() -> None:
    costs = fit(DOCUMENT)
    for frames in (1, 2, 4, 10, 16, 32):
        assert costs.of_step(frames, 0) == pytest.approx(STEP + 0.001 * frames)
    assert costs.of_step(1, 100) == pytest.approx(STEP + 0.001 + 100 * TOKEN)
    assert costs.of_decoding([10]) == pytest.approx(CALL + CHUNK + 10 * FRAME)
    # Without packing, chunks are padded to the longest.
    assert costs.of_decoding([2, 10, 4]) == pytest.approx(CALL + 3 * (CHUNK + 10 * FRAME))
    assert costs.of_decoding([]) == 0
    assert costs.frame_rate == 20
    assert costs.source == "random:tiny on cpu"


def test_packed_chunks_cost_only_their_own_frames() -> None:
    calls = [
        {"chunks": chunks, "frames": longest, "all_frames": all, "calls": 5, "seconds": 5 * seconds}
        for chunks, longest, all in ((1, 2, 2), (1, 8, 8), (16, 16, 31), (16, 16, 256))
        for seconds in (CALL + chunks * CHUNK + all * FRAME,)
    ]
    run = {**RUN, "throughput": [row(1, decodes=calls)]}
    costs = fit({**DOCUMENT, "runs": [{**run, "packed": True}]})
    assert costs.of_decoding([1] * 15 + [16]) == pytest.approx(CALL + 16 * CHUNK + 31 * FRAME)
    assert costs.of_decoding([2, 10, 4]) == pytest.approx(CALL + 3 * CHUNK + 16 * FRAME)


def test_fitted_decoding_costs_are_never_negative() -> None:
    # Noise made longer chunks faster, so the fitted cost per frame is 0.
    restless = [
        {"chunks": 1, "frames": 2, "calls": 1, "seconds": 0.009},
        {"chunks": 1, "frames": 8, "calls": 1, "seconds": 0.007},
        {"chunks": 4, "frames": 8, "calls": 1, "seconds": 0.020},
    ]
    costs = fit({**DOCUMENT, "runs": [{**RUN, "throughput": [row(1, decodes=restless)]}]})
    assert costs.frame == 0
    assert min(costs.call, costs.chunk) > 0
    assert costs.of_decoding([8] * 4) == pytest.approx(0.020, rel=0.05)


def test_a_curve_is_linear_between_its_points_and_constant_before_them() -> None:
    curve = CostCurve(((2, 1.0), (4, 3.0), (8, 3.0)))
    assert [curve.at(batch) for batch in (1, 2, 3, 4, 6, 100)] == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]


def interrupted() -> str:
    """Return an incomplete engine benchmark."""
    document = new_document("engine", dict(describe_client()), {})
    document["runs"].append(
        {"name": "random:tiny", "engine": {"dtype": "float32", "backend": "eager"}, "throughput": []}
    )
    return json.dumps(document)


@pytest.mark.parametrize(
    "broken", ["{", "[]", "{}", json.dumps(new_document("load", dict(describe_client()), {})), interrupted()]
)
def test_a_file_that_is_not_a_benchmark_is_rejected(tmp_path: Path, broken: str) -> None:
    (tmp_path / "bench.json").write_text(broken)
    with pytest.raises(InvalidRequest, match=r"bench\.json"):
        read_costs(tmp_path / "bench.json")
