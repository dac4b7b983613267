"""The command that runs fleets which are not there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import Json, Quiet

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.cluster.routing import StrategyName
    from shoal.simulate.report import Figures
    from shoal.simulate.run import Outage, Scenario

PANEL = "Measure"
ALL = "all"

Trace = Annotated[
    Path | None, typer.Option(help='Requests: {"at": 1.5, "seconds": 4.2, "voice": "a"} per line; or draw them:')
]
Check = Annotated[
    Path | None, typer.Option(help="Instead: take the requests of `shoal load --json FILE`, and compare.")
]
Cells = Annotated[
    int, typer.Option(min=1, help="Equal parts of the fleet, each with its own balancer; one is simulated.")
]


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(simulate)


def simulate(
    costs: Annotated[Path, typer.Option(help="What `shoal bench engine --json FILE` wrote on such a GPU.")],
    trace: Trace = None,
    rate: Annotated[float, typer.Option(min=0.001, help="requests per second,")] = 10.0,
    seconds: Annotated[float, typer.Option(min=1, help="for so long,")] = 60.0,
    speech: Annotated[float, typer.Option(min=0.1, help="of so many seconds of speech on average,")] = 6.0,
    voices: Annotated[int, typer.Option(min=1, help="in so many voices, few of them asked for often,")] = 100,
    swing: Annotated[float, typer.Option(min=0, max=1, help="0.5: half to one and a half times the rate.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Other dice.")] = 0,
    check: Check = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Size of the fleet; else the smallest for the goal.")] = None,
    goal: Annotated[float, typer.Option(min=1, help="p95 of first audio, in ms.")] = 300.0,
    strategy: Annotated[str, typer.Option(help="round-robin, least-connections, voice-affinity or all.")] = ALL,
    slots: Annotated[int, typer.Option(min=1, help="Voices per GPU.")] = 16,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of KV memory per GPU, of 16 columns.")] = 4096,
    voice_columns: Annotated[int, typer.Option(min=0, help="Columns of a prompt that are the voice,")] = 250,
    text_columns: Annotated[int, typer.Option(min=1, help="and those that are the text.")] = 50,
    cells: Cells = 1,
    zones: Annotated[int, typer.Option(min=1, help="Zones the GPUs are spread over.")] = 1,
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
    from shoal.simulate.costs import read_costs
    from shoal.simulate.run import Scenario
    from shoal.simulate.server import Fleet
    from shoal.simulate.traffic import Pattern, part_of, read_trace

    chosen = list(STRATEGIES) if strategy == ALL else [check_strategy(strategy)]
    fleet = Fleet(read_costs(costs), EngineConfig(slots=slots), blocks, voice_columns, text_columns)
    if check is not None:
        _check(check, Scenario(fleet, (), gpus or 1, chosen[-1]), json=json)
        return
    arrivals = part_of(
        read_trace(trace) if trace else Pattern(rate, seconds, speech, voices, swing, seed).arrivals(), cells
    )
    scenario = Scenario(fleet, arrivals, servers=1, zones=zones, outage=_outage(outage))
    found = _runs(scenario, chosen, gpus=gpus, goal=goal / 1000, gpu_hour=gpu_hour, cells=cells, quiet=quiet)
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
) -> "list[Figures]":
    """Of every strategy: the fleet of that size, or else the smallest whose first audio keeps the goal."""
    from dataclasses import replace

    from rich.console import Console

    from shoal.simulate.report import fewest_gpus, figures
    from shoal.simulate.run import simulate as run

    found: list[Figures] = []
    with Console(stderr=True, quiet=quiet).status("reading") as line:
        for name in strategies:
            each = replace(scenario, strategy=name)

            def told(count: int, name: str = name) -> None:
                line.update(f"{name}: {count * cells} GPUs, {len(scenario.arrivals) * cells} requests")

            count = -(-gpus // cells) if gpus else fewest_gpus(each, goal, on_try=told)
            told(count)
            each = replace(each, servers=count)
            found.append(figures(each, run(each), gpu_hour).times(cells))
    return found


def _check(measured: Path, scenario: "Scenario", *, json: bool) -> None:
    from rich.table import Table

    from shoal.bench.document import read_document
    from shoal.bench.report.sheets import duration
    from shoal.cli.tables import print_json, show_table
    from shoal.simulate.check import check

    found = check(read_document(measured), scenario)
    if json:
        print_json({"costs": scenario.fleet.costs.source, "figures": [each.as_json() for each in found]})
        return
    table = Table("load", "requests", "figure", "measured", "simulated", "off")
    for each in found:
        times = (duration(each.measured), duration(each.simulated))
        table.add_row(each.stage, str(each.requests), each.figure, *times, f"{each.off:+.1%}")
    show_table(table)


def _outage(text: str | None) -> "Outage | None":
    from shoal.errors import InvalidRequest
    from shoal.simulate.run import Outage

    if text is None:
        return None
    try:
        at, seconds = (float(part) for part in text.split(":"))
    except ValueError:
        raise InvalidRequest(f"--outage is AT:SECONDS, such as 20:30, not {text!r}") from None
    return Outage(at, seconds)


def _table(found: "list[Figures]") -> "Table":
    from rich.table import Table

    headers = ("strategy", "GPUs", "first audio p50", "p95", "p99", "speech p95", "busy", "cached", "failed", "moved")
    table = Table(*headers, "per hour", "per audio hour")
    for each in found:
        first = (each.first_audio_p50, each.first_audio_p95, each.first_audio_p99)
        table.add_row(
            each.strategy,
            f"{each.gpus:,}",
            *(f"{seconds * 1000:,.0f} ms" for seconds in first),
            f"{each.speech_p95:.2f} s",
            f"{each.busy:.0%}",
            f"{each.prompt_saved:.0%}",
            str(each.failed),
            str(each.moved),
            f"{each.cost_per_hour:,.2f}",
            f"{each.cost_per_audio_hour:,.4f}",
        )
    return table
