"""`shoal simulate`: discrete-event simulation of a fleet of GPUs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flag_groups import with_groups
from shoal.cli.flags import Json, Quiet

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.cluster.routing import StrategyName
    from shoal.tools.simulate.report import FleetMetrics
    from shoal.tools.simulate.run import Outage, Scenario
    from shoal.tools.simulate.server import Fleet
    from shoal.tools.simulate.traffic import Arrival, TrafficPattern

PANEL = "Measure"
ALL = "all"

Trace = Annotated[
    Path | None,
    typer.Option(
        help='Trace of requests, one {"at": 1.5, "seconds": 4.2, "voice": "a"} per line. Default: random traffic.'
    ),
]
CheckFile = Annotated[
    Path | None,
    typer.Option(
        help="Validate the simulator: replay the requests of `shoal load --json FILE` and compare the latencies."
    ),
]
Cells = Annotated[
    int,
    typer.Option(min=1, help="Equal parts of the fleet, each with its own load balancer; only one is simulated."),
]
Voices = Annotated[
    int,
    typer.Option(min=1, max=10**6, help="Random traffic: number of voices, with Zipf-distributed popularity."),
]
Blocks = Annotated[int, typer.Option(min=1, max=10**6, help="KV cache blocks of 16 tokens per GPU.")]


Costs = Annotated[
    Path, typer.Option(help="File written by `shoal bench engine --json FILE` on a GPU of the simulated type.")
]
Rate = Annotated[float, typer.Option(min=0.001, help="Random traffic: mean requests per second.")]
Seconds = Annotated[float, typer.Option(min=1, help="Random traffic: duration in seconds.")]
Speech = Annotated[float, typer.Option(min=0.1, max=3600, help="Random traffic: mean seconds of speech per request.")]
Swing = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="Random traffic: variation of the rate; 0.5 swings between 0.5 and 1.5 times --rate."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random traffic.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="Number of GPUs. Default: the smallest fleet that meets --goal.")]
Goal = Annotated[float, typer.Option(min=1, help="Goal: p95 of the time to first audio, in ms.")]
Strategy = Annotated[str, typer.Option(help="Routing strategy: round-robin, least-connections, voice-affinity or all.")]
Slots = Annotated[int, typer.Option(min=1, help="Maximum batch size per GPU.")]
VoiceTokens = Annotated[
    int, typer.Option(min=0, help="Prompt tokens of the voice, shared by the requests that use it.")
]
TextTokens = Annotated[int, typer.Option(min=1, help="Prompt tokens of the text, different in every request.")]
Zones = Annotated[int, typer.Option(min=1, max=1000, help="Availability zones over which the GPUs are distributed.")]
OutageOption = Annotated[
    str | None,
    typer.Option(metavar="AT:SECONDS", help="Outage of the first zone: start and duration in seconds."),
]
GpuHour = Annotated[float, typer.Option(min=0, help="Price of one GPU per hour, for the cost figures.")]


@dataclass(frozen=True)
class TrafficFlags:
    """Random traffic, for a simulation without a trace."""

    rate: Rate = 10.0
    seconds: Seconds = 60.0
    speech: Speech = 6.0
    voices: Voices = 100
    swing: Swing = 0.0
    seed: Seed = 0

    def pattern(self) -> "TrafficPattern":
        from shoal.tools.simulate.traffic import TrafficPattern

        return TrafficPattern(self.rate, self.seconds, self.speech, self.voices, self.swing, self.seed)


@dataclass(frozen=True)
class GpuFlags:
    """One simulated GPU, and the prompts of its requests."""

    slots: Slots = 16
    blocks: Blocks = 4096
    voice_tokens: VoiceTokens = 250
    text_tokens: TextTokens = 50

    def fleet(self, costs: Path) -> "Fleet":
        """Return GPUs whose steps take the times of a file. Raises InvalidRequest."""
        from shoal.config import EngineConfig
        from shoal.tools.simulate.costs import read_costs
        from shoal.tools.simulate.server import Fleet

        config = EngineConfig(slots=self.slots)
        return Fleet(read_costs(costs), config, self.blocks, self.voice_tokens, self.text_tokens)


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(with_groups(simulate))


def simulate(
    costs: Costs,
    trace: Trace = None,
    *,
    traffic: TrafficFlags,
    check: CheckFile = None,
    gpus: Gpus = None,
    goal: Goal = 300.0,
    strategy: Strategy = ALL,
    gpu: GpuFlags,
    cells: Cells = 1,
    zones: Zones = 1,
    outage: OutageOption = None,
    gpu_hour: GpuHour = 0.0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Simulate a fleet of GPUs: how many meet a latency goal, what they cost, and what a routing strategy gains.

    The simulation runs the real scheduler and the real routing; the time of a step comes from a benchmark.

    Example: shoal simulate --costs engine.json --rate 200 --goal 300 --gpu-hour 2.5

    Example: shoal simulate --costs engine.json --check load.json --slots 16
    """
    from shoal.cli.tables import print_json, show_table
    from shoal.cluster.routing import STRATEGIES, check_strategy
    from shoal.tools.simulate.run import Scenario

    gpus_per_cell = _gpus_per_cell(gpus, cells)
    chosen = list(STRATEGIES) if strategy == ALL else [check_strategy(strategy)]
    fleet = gpu.fleet(costs)
    if check is not None:
        _check(check, Scenario(fleet, (), gpus or 1, chosen[-1]), json=json)
        return
    arrivals = _arrivals(traffic.pattern(), trace, cells)
    scenario = Scenario(fleet, arrivals, servers=1, zones=zones, outage=_outage(outage))
    found = _runs(scenario, chosen, gpus=gpus_per_cell, goal=goal / 1000, gpu_hour=gpu_hour, cells=cells, quiet=quiet)
    if json:
        document = {"costs": fleet.costs.source, "goal_seconds": goal / 1000}
        print_json({**document, "runs": [each.as_json() for each in found]})
    else:
        show_table(_table(found))


def _arrivals(pattern: "TrafficPattern", trace: Path | None, cells: int) -> "list[Arrival]":
    """Return the requests of one cell, of the trace if there is one. Raises InvalidRequest if there are none."""
    from shoal.errors import InvalidRequest
    from shoal.tools.simulate.traffic import read_trace, sample_cell

    found = sample_cell(read_trace(trace), cells, pattern.seed) if trace else pattern.for_cell(cells).arrivals()
    if not found:
        raise InvalidRequest("the traffic has no requests: raise --rate or --seconds, or lower --cells")
    return found


def _runs(
    scenario: "Scenario",
    strategies: "list[StrategyName]",
    *,
    gpus: int | None,
    goal: float,
    gpu_hour: float,
    cells: int,
    quiet: bool,
) -> "list[FleetMetrics]":
    """Simulate every strategy with `gpus` GPUs per cell, or with the smallest fleet that meets the goal."""
    from dataclasses import replace

    from rich.console import Console

    from shoal.tools.simulate.report import fleet_metrics, smallest_fleet
    from shoal.tools.simulate.run import simulate as run

    found: list[FleetMetrics] = []
    with Console(stderr=True, quiet=quiet).status("reading") as line:
        for name in strategies:
            each = replace(scenario, strategy=name)

            def show(count: int, name: str = name) -> None:
                line.update(f"{name}: {count * cells} GPUs, {len(scenario.arrivals) * cells} requests")

            count = gpus or smallest_fleet(each, goal, on_try=show)
            show(count)
            each = replace(each, servers=count)
            found.append(fleet_metrics(each, run(each), gpu_hour).times(cells))
    return found


def _check(measured: Path, scenario: "Scenario", *, json: bool) -> None:
    from rich.table import Table

    from shoal.cli.tables import print_json, show_table
    from shoal.tools.bench.document import read_document
    from shoal.tools.bench.report.tables import duration
    from shoal.tools.simulate.check import check

    found = check(read_document(measured), scenario)
    if json:
        print_json({"costs": scenario.fleet.costs.source, "figures": [each.as_json() for each in found]})
        return
    table = Table("load", "requests", "figure", "measured", "simulated", "off")
    for each in found:
        times = (duration(each.measured), duration(each.simulated))
        table.add_row(each.stage, str(each.requests), each.figure, *times, f"{each.off:+.1%}")
    show_table(table)


def _gpus_per_cell(gpus: int | None, cells: int) -> int | None:
    from shoal.errors import InvalidRequest
    from shoal.tools.simulate.report import MAX_GPUS

    if gpus is None:
        return None
    if gpus % cells:
        raise InvalidRequest(f"{gpus} GPUs cannot be divided into {cells} equal cells: use a multiple of --cells")
    if gpus // cells > MAX_GPUS:
        raise InvalidRequest(f"at most {MAX_GPUS:,} GPUs behind one balancer can be simulated: raise --cells")
    return gpus // cells


def _outage(text: str | None) -> "Outage | None":
    from shoal.errors import InvalidRequest
    from shoal.tools.simulate.run import Outage

    if text is None:
        return None
    try:
        at, seconds = (float(part) for part in text.split(":"))
    except ValueError:
        raise InvalidRequest(f"--outage {text!r} is not of the form AT:SECONDS, such as 20:30") from None
    return Outage(at, seconds)


def _table(found: "list[FleetMetrics]") -> "Table":
    """Return a table with a row per metric and a column per strategy."""
    from rich.table import Table

    table = Table("")
    for each in found:
        table.add_column(each.strategy, justify="right", overflow="fold")
    columns = [_shown(each) for each in found]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _shown(each: "FleetMetrics") -> dict[str, str]:
    return {
        "GPUs": f"{each.gpus:,}",
        "TTFA p50": f"{each.first_audio_p50 * 1000:,.0f} ms",
        "p95": f"{each.first_audio_p95 * 1000:,.0f} ms",
        "p99": f"{each.first_audio_p99 * 1000:,.0f} ms",
        "request p95": f"{each.speech_p95:,.2f} s",
        "GPU busy": f"{each.busy:.0%}",
        "prompt tokens cached": f"{each.prompt_saved:.0%}",
        "failed requests": f"{each.failed:,}",
        "rerouted requests": f"{each.moved:,}",
        "cost per hour": f"{each.cost_per_hour:,.2f}",
        "cost per audio hour": f"{each.cost_per_audio_hour:,.4f}",
    }
