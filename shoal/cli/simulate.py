"""The command that runs fleets which are not there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import Json, Quiet

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.cluster.routing import StrategyName
    from shoal.tools.simulate.report import FleetMetrics
    from shoal.tools.simulate.run import Outage, Scenario

PANEL = "Measure"
ALL = "all"

Trace = Annotated[
    Path | None, typer.Option(help='Requests: {"at": 1.5, "seconds": 4.2, "voice": "a"} per line; or draw them:')
]
Prediction = Annotated[
    Path | None, typer.Option(help="Instead: take the requests of `shoal load --json FILE`, and compare.")
]
Cells = Annotated[
    int, typer.Option(min=1, help="Equal parts of the fleet, each with its own balancer; one is simulated.")
]
Voices = Annotated[int, typer.Option(min=1, max=10**6, help="in so many voices, few of them asked for often,")]
Blocks = Annotated[int, typer.Option(min=1, max=10**6, help="Blocks of KV memory per GPU, of 16 columns.")]


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(simulate)


def simulate(
    costs: Annotated[Path, typer.Option(help="What `shoal bench engine --json FILE` wrote on such a GPU.")],
    trace: Trace = None,
    rate: Annotated[float, typer.Option(min=0.001, help="requests per second,")] = 10.0,
    seconds: Annotated[float, typer.Option(min=1, help="for so long,")] = 60.0,
    speech: Annotated[float, typer.Option(min=0.1, max=3600, help="of so many seconds of speech on average,")] = 6.0,
    voices: Voices = 100,
    swing: Annotated[float, typer.Option(min=0, max=1, help="0.5: half to one and a half times the rate.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Other dice.")] = 0,
    check: Prediction = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Size of the fleet; else the smallest for the goal.")] = None,
    goal: Annotated[float, typer.Option(min=1, help="p95 of first audio, in ms.")] = 300.0,
    strategy: Annotated[str, typer.Option(help="round-robin, least-connections, voice-affinity or all.")] = ALL,
    slots: Annotated[int, typer.Option(min=1, help="Voices per GPU.")] = 16,
    blocks: Blocks = 4096,
    voice_columns: Annotated[int, typer.Option(min=0, help="Columns of a prompt that are the voice,")] = 250,
    text_columns: Annotated[int, typer.Option(min=1, help="and those that are the text.")] = 50,
    cells: Cells = 1,
    zones: Annotated[int, typer.Option(min=1, max=1000, help="Zones the GPUs are spread over.")] = 1,
    outage: Annotated[str | None, typer.Option(metavar="AT:SECONDS", help="The first zone is gone meanwhile.")] = None,
    gpu_hour: Annotated[float, typer.Option(min=0, help="Price of a GPU and hour.")] = 0.0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a fleet of GPUs on paper: how many a latency goal takes, what that costs, what a strategy buys.

    The scheduler and the routing are the real ones; what a step costs comes from a benchmark.

    Example: shoal simulate --costs engine.json --rate 200 --goal 300 --gpu-hour 2.5

    Example: shoal simulate --costs engine.json --check load.json --slots 16
    """
    from shoal.cli.tables import print_json, show_table
    from shoal.cluster.routing import STRATEGIES, check_strategy
    from shoal.config import EngineConfig
    from shoal.errors import InvalidRequest
    from shoal.tools.simulate.costs import read_costs
    from shoal.tools.simulate.run import Scenario
    from shoal.tools.simulate.server import Fleet
    from shoal.tools.simulate.traffic import TrafficPattern, read_trace, sample_cell

    gpus_of_a_cell = _gpus_of_a_cell(gpus, cells)
    chosen = list(STRATEGIES) if strategy == ALL else [check_strategy(strategy)]
    fleet = Fleet(read_costs(costs), EngineConfig(slots=slots), blocks, voice_columns, text_columns)
    if check is not None:
        _check(check, Scenario(fleet, (), gpus or 1, chosen[-1]), json=json)
        return
    pattern = TrafficPattern(rate, seconds, speech, voices, swing, seed).for_cell(cells)
    arrivals = sample_cell(read_trace(trace), cells, seed) if trace else pattern.arrivals()
    if not arrivals:
        raise InvalidRequest("not one request comes: raise --rate or --seconds, or simulate fewer --cells")
    scenario = Scenario(fleet, arrivals, servers=1, zones=zones, outage=_outage(outage))
    found = _runs(scenario, chosen, gpus=gpus_of_a_cell, goal=goal / 1000, gpu_hour=gpu_hour, cells=cells, quiet=quiet)
    if json:
        print_json(
            {"costs": fleet.costs.source, "goal_seconds": goal / 1000, "runs": [each.as_json() for each in found]}
        )
    else:
        show_table(_table(found))


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
    """Of every strategy: a fleet of cells of so many GPUs, or else the smallest whose first audio keeps the goal."""
    from dataclasses import replace

    from rich.console import Console

    from shoal.tools.simulate.report import figures, smallest_fleet
    from shoal.tools.simulate.run import simulate as run

    found: list[FleetMetrics] = []
    with Console(stderr=True, quiet=quiet).status("reading") as line:
        for name in strategies:
            each = replace(scenario, strategy=name)

            def told(count: int, name: str = name) -> None:
                line.update(f"{name}: {count * cells} GPUs, {len(scenario.arrivals) * cells} requests")

            count = gpus or smallest_fleet(each, goal, on_try=told)
            told(count)
            each = replace(each, servers=count)
            found.append(figures(each, run(each), gpu_hour).times(cells))
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


def _gpus_of_a_cell(gpus: int | None, cells: int) -> int | None:
    from shoal.errors import InvalidRequest
    from shoal.tools.simulate.report import MAX_GPUS

    if gpus is None:
        return None
    if gpus % cells:
        raise InvalidRequest(f"{gpus} GPUs are not {cells} equal cells: --gpus must be a multiple of --cells")
    if gpus // cells > MAX_GPUS:
        raise InvalidRequest(f"{MAX_GPUS:,} GPUs behind one balancer can be simulated: divide more with --cells")
    return gpus // cells


def _outage(text: str | None) -> "Outage | None":
    from shoal.errors import InvalidRequest
    from shoal.tools.simulate.run import Outage

    if text is None:
        return None
    try:
        at, seconds = (float(part) for part in text.split(":"))
    except ValueError:
        raise InvalidRequest(f"--outage is AT:SECONDS, such as 20:30, not {text!r}") from None
    return Outage(at, seconds)


def _table(found: "list[FleetMetrics]") -> "Table":
    """A row per figure: a dozen columns would not fit into a terminal."""
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
        "first audio p50": f"{each.first_audio_p50 * 1000:,.0f} ms",
        "p95": f"{each.first_audio_p95 * 1000:,.0f} ms",
        "p99": f"{each.first_audio_p99 * 1000:,.0f} ms",
        "speech p95": f"{each.speech_p95:,.2f} s",
        "busy": f"{each.busy:.0%}",
        "cached": f"{each.prompt_saved:.0%}",
        "failed": f"{each.failed:,}",
        "moved": f"{each.moved:,}",
        "per hour": f"{each.cost_per_hour:,.2f}",
        "per audio hour": f"{each.cost_per_audio_hour:,.4f}",
    }
