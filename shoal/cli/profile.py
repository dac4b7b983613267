"""The command that says where the time goes."""

from typing import Annotated

import typer

from shoal.cli.flags import Device, Json, Quantize

PANEL = "Measure"


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(profile)


def profile(
    model: Annotated[str, typer.Option(help="A directory, s1-mini, s2-pro, OWNER/NAME or random:tiny.")] = "nano",
    device: Device = "auto",
    voices: Annotated[int, typer.Option(min=1, max=128, help="Voices that speak at once.")] = 1,
    quantize: Quantize = None,
    json: Json = False,
) -> None:
    """Show where the time of a request goes, part by part, and how close each is to what the memory can deliver.

    Example: shoal profile --model random:tiny --voices 4
    """
    from rich.console import Console

    from shoal.tools.bench.profile import render, run_profile

    result = run_profile(model, device=device, voices=voices, quantize=quantize)
    if json:
        typer.echo(result.as_json())
    else:
        Console().print(render(result))
