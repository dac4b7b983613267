"""Whether the simulator is right: what `shoal load` measured beside what it makes of the same requests."""

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
    """One figure of one stage, in seconds."""

    stage: str
    requests: int
    figure: str
    measured: float
    simulated: float

    @property
    def off(self) -> float:
        """How much too slow the simulator is: 0.1 is a tenth, -0.1 a tenth too fast."""
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
    """The stages of a load test of one server, each simulated with its own requests instead of the scenario's.

    Raises InvalidRequest for what is no such test.
    """
    if document["kind"] != "load" or len(document["runs"]) != 1:
        raise InvalidRequest("a check needs what `shoal load --json` measured on one server")
    return [each for stage in document["runs"][0]["stages"] for each in _stage(stage, scenario)]


def _stage(stage: dict[str, Any], scenario: Scenario) -> Iterator[Prediction]:
    # A request that failed is not known to have cost anything.
    heard = [each for each in stage["outcomes"] if each["error"] is None]
    heard.sort(key=lambda each: float(each["due"]))
    # Whatever voice there was is known since the warm-up, so only the text is computed.
    arrivals = [Arrival(each["due"], each["audio_seconds"]) for each in heard]
    outcome: SimulationResult = simulate(replace(scenario, arrivals=arrivals))
    for name, key, simulated in (
        ("first audio", "first_audio", outcome.first_audio()),
        ("speech", "seconds", outcome.whole()),
    ):
        measured = sorted(each[key] for each in heard)
        for part in PERCENTILES if measured else ():
            figure = f"{name} P{100 * part:.0f}"
            yield Prediction(stage["name"], len(heard), figure, percentile(measured, part), percentile(simulated, part))
