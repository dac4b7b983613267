"""Validation of the simulator: latencies measured by `shoal load` against a simulation of the same requests."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import InvalidRequest
from shoal.tools.bench.document import Document
from shoal.tools.simulate.report import percentile
from shoal.tools.simulate.run import Scenario, SimulationResult, simulate
from shoal.tools.simulate.traffic import Arrival

PERCENTILES = (0.50, 0.95)


@dataclass(frozen=True)
class Prediction:
    """One latency percentile of one load stage, measured and simulated, in seconds."""

    stage: str
    requests: int
    figure: str
    measured: float
    simulated: float

    @property
    def off(self) -> float:
        """Relative error: 0.1 means that the simulated latency is 10 % too long, -0.1 that it is 10 % too short."""
        return self.simulated / self.measured - 1

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "requests": self.requests,
            "figure": self.figure,
            "measured": round(self.measured, 5),
            "simulated": round(self.simulated, 5),
            "off": round(self.off, 4),
        }


def check(document: Document, scenario: Scenario) -> list[Prediction]:
    """Simulate every stage of a load test with the requests of that stage, instead of the scenario's.

    Raises InvalidRequest if the document is not a load test of exactly one server.
    """
    if document["kind"] != "load" or len(document["runs"]) != 1:
        raise InvalidRequest("--check needs a file written by `shoal load --json` for one server")
    return [each for stage in document["runs"][0]["stages"] for each in _stage(stage, scenario)]


def _stage(stage: dict[str, Any], scenario: Scenario) -> Iterator[Prediction]:
    # The cost of failed requests is unknown, so they are left out.
    completed = [each for each in stage["outcomes"] if each["error"] is None]
    completed.sort(key=lambda each: float(each["due"]))
    # The warm-up has put the voice into the prefix cache, so only the tokens of the text are computed.
    arrivals = [Arrival(each["due"], each["audio_seconds"]) for each in completed]
    outcome: SimulationResult = simulate(replace(scenario, arrivals=arrivals))
    for name, key, simulated in (
        ("first audio", "first_audio", outcome.first_audio()),
        ("speech", "seconds", outcome.latency()),
    ):
        measured = sorted(each[key] for each in completed)
        for part in PERCENTILES if measured else ():
            figure = f"{name} P{100 * part:.0f}"
            yield Prediction(
                stage["name"], len(completed), figure, percentile(measured, part), percentile(simulated, part)
            )
