"""The scripts that measure the server without a model."""

from pathlib import Path

from scripts import encoding_cost
from scripts.serving_overhead import FRAMES, measure
from tests.server.conftest import free_port


def test_the_cost_of_serving_is_measured_without_a_device() -> None:
    found = measure(clients=2, requests=4, port=free_port())
    assert (found["requests"], found["errors"]) == (4, {})
    assert found["cpu_ms_per_request"].keys() == {"server", "engine", "load"}
    # Frames of 2,048 samples at 44.1 kHz take at least the time of their steps.
    assert found["latency_ms"]["p50"] > FRAMES * 1.06


def test_the_cost_of_every_format_is_measured() -> None:
    sample = Path(__file__).parents[2] / "docs" / "samples" / "otis.mp3"
    speech = encoding_cost.read_speech([sample], 1.0)
    assert len(speech) == encoding_cost.RATE
    found = encoding_cost.measure(speech, repeats=1)
    assert found.keys() == encoding_cost.OUTPUTS.keys()
    assert all(cost > 0 for cost in found.values())
