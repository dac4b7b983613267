"""`shoal profile`: time per part of a request."""

from typing import Annotated

import typer

from shoal.cli.flags import Device, Json, Quantize

PANEL = "Measure"


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(profile)


def profile(
    model: Annotated[
        str,
        typer.Option(help="Model to profile: nano, s1-mini, s2-pro, OWNER/NAME, a directory, or random:tiny, random:…"),
    ] = "nano",
    device: Device = "auto",
    voices: Annotated[int, typer.Option(min=1, max=128, help="Batch size: sequences generated together.")] = 1,
    quantize: Quantize = None,
    json: Json = False,
) -> None:
    """Show the time of every part of a request and how close each comes to the memory bandwidth of the device.

    Example: shoal profile --model random:tiny --voices 4
    """
    from rich.console import Console

    from shoal.tools.bench.profile import render, run_profile

    result = run_profile(model, device=device, voices=voices, quantize=quantize)
    if json:
        typer.echo(result.as_json())
    else:
        Console().print(render(result))
