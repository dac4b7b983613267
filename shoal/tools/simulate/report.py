"""What a simulated run says: latencies, use, cost; and the smallest fleet that keeps a goal."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from shoal.errors import InvalidRequest
from shoal.tools.simulate.run import Scenario, SimulationResult, simulate

MAX_GPUS = 10_000  # of a cell: block pools of 3 GB, and a balancer that looks at every one of them


@dataclass(frozen=True)
class FleetMetrics:
    """Of one run; times in seconds, shares from 0 to 1."""

    strategy: str
    gpus: int
    requests: int
    failed: int
    moved: int  # to another GPU, since theirs died
    first_audio_p50: float
    first_audio_p95: float
    first_audio_p99: float
    speech_p95: float
    busy: float  # percentile of the time that the GPUs work
    prompt_saved: float  # percentile of prompt columns that were cached
    audio_per_gpu_second: float
    cost_per_hour: float
    cost_per_audio_hour: float

    def times(self, cells: int) -> "FleetMetrics":
        """Of so many cells like this one."""
        counts = {name: getattr(self, name) * cells for name in ("gpus", "requests", "failed", "moved")}
        return replace(self, **counts, cost_per_hour=self.cost_per_hour * cells)

    def as_json(self) -> dict[str, Any]:
        return {name: round(value, 5) if isinstance(value, float) else value for name, value in asdict(self).items()}


def figures(scenario: Scenario, outcome: SimulationResult, gpu_hour: float) -> FleetMetrics:
    first, whole, seconds = outcome.first_audio(), outcome.whole(), max(outcome.seconds, 1e-9)
    audio = sum(each.arrival.seconds for each in outcome.speeches if each.ended is not None and not each.failed)
    gpus = scenario.servers
    return FleetMetrics(
        strategy=scenario.strategy,
        gpus=gpus,
        requests=len(outcome.speeches),
        failed=outcome.failed,
        moved=sum(each.moves > 0 for each in outcome.speeches),
        first_audio_p50=percentile(first, 0.50),
        first_audio_p95=percentile(first, 0.95),
        first_audio_p99=percentile(first, 0.99),
        speech_p95=percentile(whole, 0.95),
        busy=sum(server.busy_seconds for server in outcome.servers) / (gpus * seconds),
        prompt_saved=_prompt_saved(scenario, outcome),
        audio_per_gpu_second=audio / (gpus * seconds),
        cost_per_hour=gpus * gpu_hour,
        cost_per_audio_hour=gpus * gpu_hour * seconds / audio if audio else 0.0,
    )


def smallest_fleet(scenario: Scenario, goal: float, *, on_try: Callable[[int], None] = lambda gpus: None) -> int:
    """The smallest fleet whose p95 of first audio is within `goal` seconds.

    Raises InvalidRequest for a goal that no fleet keeps.
    """
    kept: dict[int, bool] = {}

    def keeps(gpus: int) -> bool:
        if gpus not in kept:
            on_try(gpus)
            kept[gpus] = percentile(simulate(replace(scenario, servers=gpus)).first_audio(), 0.95) <= goal
        return kept[gpus]

    enough = max(1, scenario.zones)
    while not keeps(enough):
        # A GPU per request is as fast as it gets.
        if enough >= len(scenario.arrivals):
            raise InvalidRequest(f"no number of these GPUs keeps a p95 of {goal * 1000:.0f} ms to first audio")
        if enough >= MAX_GPUS:
            raise InvalidRequest(f"{MAX_GPUS:,} GPUs behind one balancer are too few: divide the fleet with --cells")
        enough = min(2 * enough, MAX_GPUS)
    few = max(enough // 2, scenario.zones - 1)  # too few: tried, or a zone would have none
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if keeps(middle) else (middle, enough)
    return enough


def percentile(sorted_values: list[float], part: float) -> float:
    """The value that `part` of all do not exceed; infinite when there are none."""
    if not sorted_values:
        return float("inf")
    return sorted_values[min(len(sorted_values) - 1, round(part * (len(sorted_values) - 1)))]


def _prompt_saved(scenario: Scenario, outcome: SimulationResult) -> float:
    fleet = scenario.fleet
    asked = sum(
        fleet.text_columns + fleet.voice_columns * (each.arrival.voice is not None) for each in outcome.speeches
    )
    saved = sum(server.scheduler.pool.stats.tokens_saved for server in outcome.servers)
    return saved / asked if asked else 0.0
