"""`shoal profile`: time per part of a request."""

from typing import Annotated

import typer

from shoal.cli.flags import Device, Json, Quantize
from shoal.cli.measure.report_output import Html, Markdown, ReportFlags, write_reports

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
    html: Html = None,
    markdown: Markdown = None,
) -> None:
    """Show the time of every part of a request, its memory, and how close it comes to the device's memory bandwidth.

    On a GPU also the share of a part's time in which a kernel runs. `shoal report` reads the JSON.

    Example: shoal profile --model random:tiny --voices 4 --html profile.html
    """
    ReportFlags(None, html, markdown).check_writable()
    from rich.console import Console

    from shoal.tools.bench.profile import render, run_profile

    result = run_profile(model, device=device, voices=voices, quantize=quantize)
    write_reports([result.document()], html, markdown)
    if json:
        typer.echo(result.as_json())
    else:
        Console().print(render(result))
