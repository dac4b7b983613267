"""Commands that measure."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.flags import Device, Quiet

PANEL = "This machine"


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(help="Measure how fast this machine speaks.", no_args_is_help=True)
    group.command()(engine)
    # With one command alone typer would drop its name.
    group.callback()(lambda: None)
    app.add_typer(group, name="bench", rich_help_panel=PANEL)


def engine(
    model: Annotated[str, typer.Option(help="A directory, s1-mini, s2-pro, OWNER/NAME or random:tiny.")] = "nano",
    device: Device = "auto",
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to a file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few frames of everything.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure the engine without a server: policies, batch sizes, prefix cache, scheduler.

    The last line is one JSON object. Ctrl-C keeps what was measured.

    Example: shoal bench engine --model random:tiny --json engine.json
    """
    from rich.console import Console

    from shoal.bench.engine import last_line, render, run_engine_bench

    result = run_engine_bench(model, device=device, json_path=json, quick=quick, progress=not quiet)
    if not quiet:
        Console().print(render(result))
    typer.echo(last_line(result))
    if not result["complete"]:
        raise typer.Exit(130)
