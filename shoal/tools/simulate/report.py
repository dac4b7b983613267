"""Metrics of a simulated run (latency, utilisation, cost) and the search for the smallest fleet that meets a goal."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from shoal.errors import InvalidRequest
from shoal.tools.simulate.run import Scenario, SimulationResult, simulate

MAX_GPUS = 10_000  # per cell; their block pools take 3 GB, and routing looks at every GPU


@dataclass(frozen=True)
class FleetMetrics:
    """Metrics of one run. Times are in seconds, shares between 0 and 1."""

    strategy: str
    gpus: int
    requests: int
    failed: int
    moved: int  # requests rerouted to another GPU after an outage
    first_audio_p50: float
    first_audio_p95: float
    first_audio_p99: float
    speech_p95: float
    busy: float  # share of the time that the GPUs are busy
    prompt_saved: float  # share of prompt tokens found in the prefix cache
    audio_per_gpu_second: float
    cost_per_hour: float
    cost_per_audio_hour: float

    def times(self, cells: int) -> "FleetMetrics":
        """Return the metrics of a fleet of `cells` cells like this one."""
        counts = {name: getattr(self, name) * cells for name in ("gpus", "requests", "failed", "moved")}
        return replace(self, **counts, cost_per_hour=self.cost_per_hour * cells)

    def as_json(self) -> dict[str, Any]:
        return {name: round(value, 5) if isinstance(value, float) else value for name, value in asdict(self).items()}


def fleet_metrics(scenario: Scenario, result: SimulationResult, gpu_hour: float) -> FleetMetrics:
    """Compute the metrics of a run; `gpu_hour` is the price of one GPU per hour."""
    first, total, seconds = result.first_audio(), result.latency(), max(result.seconds, 1e-9)
    audio = sum(each.arrival.seconds for each in result.requests if each.ended is not None and not each.failed)
    gpus = scenario.servers
    return FleetMetrics(
        strategy=scenario.strategy,
        gpus=gpus,
        requests=len(result.requests),
        failed=result.failed,
        moved=sum(each.moves > 0 for each in result.requests),
        first_audio_p50=percentile(first, 0.50),
        first_audio_p95=percentile(first, 0.95),
        first_audio_p99=percentile(first, 0.99),
        speech_p95=percentile(total, 0.95),
        busy=sum(server.busy_seconds for server in result.servers) / (gpus * seconds),
        prompt_saved=_prompt_saved(scenario, result),
        audio_per_gpu_second=audio / (gpus * seconds),
        cost_per_hour=gpus * gpu_hour,
        cost_per_audio_hour=gpus * gpu_hour * seconds / audio if audio else 0.0,
    )


def smallest_fleet(scenario: Scenario, goal: float, *, on_try: Callable[[int], None] = lambda gpus: None) -> int:
    """Return the smallest number of GPUs whose p95 of the time to first audio is at most `goal` seconds.

    `on_try` is called with every size before it is simulated. Raises InvalidRequest if no fleet meets the goal.
    """
    results: dict[int, bool] = {}

    def meets_goal(gpus: int) -> bool:
        if gpus not in results:
            on_try(gpus)
            results[gpus] = percentile(simulate(replace(scenario, servers=gpus)).first_audio(), 0.95) <= goal
        return results[gpus]

    enough = max(1, scenario.zones)
    while not meets_goal(enough):
        # More than one GPU per request cannot help.
        if enough >= len(scenario.arrivals):
            raise InvalidRequest(f"no number of these GPUs reaches a p95 of {goal * 1000:.0f} ms to first audio")
        if enough >= MAX_GPUS:
            raise InvalidRequest(f"{MAX_GPUS:,} GPUs behind one balancer are too few: divide the fleet with --cells")
        enough = min(2 * enough, MAX_GPUS)
    too_few = max(enough // 2, scenario.zones - 1)  # already simulated, or fewer than one GPU per zone
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if meets_goal(middle) else (middle, enough)
    return enough


def percentile(sorted_values: list[float], part: float) -> float:
    """Return the value that a share `part` of the values does not exceed (nearest rank); infinity if there are none."""
    if not sorted_values:
        return float("inf")
    return sorted_values[min(len(sorted_values) - 1, round(part * (len(sorted_values) - 1)))]


def _prompt_saved(scenario: Scenario, result: SimulationResult) -> float:
    fleet = scenario.fleet
    total = sum(fleet.text_tokens + fleet.voice_tokens * (each.arrival.voice is not None) for each in result.requests)
    saved = sum(server.scheduler.pool.stats.tokens_saved for server in result.servers)
    return saved / total if total else 0.0
