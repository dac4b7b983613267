"""`shoal doctor` and `shoal version`."""

from typing import Annotated

import typer

from shoal import __version__

PANEL = "This machine"


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(doctor)
    app.command(rich_help_panel=PANEL)(version)


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Show how many sequences common GPUs hold, and their predicted speed, instead."),
    ] = False,
) -> None:
    """Check this machine: hardware, missing packages, available models, and the device and dtype that will be used.

    Example: shoal doctor

    Example: shoal doctor --plan
    """
    from shoal.cli.tables import print_json, show_plan, show_predictions, show_report
    from shoal.tools.doctor import examine

    if plan:
        from dataclasses import asdict

        from shoal.engine.memory.capacity import capacity_table
        from shoal.tools.predicted_speed import predicted_table

        holdings, speeds = capacity_table(), predicted_table()
        if json:
            print_json({"cards": [asdict(each) for each in holdings], "predicted": [asdict(each) for each in speeds]})
        else:
            show_plan(holdings)
            show_predictions(speeds)
        return
    report = examine()
    if json:
        print_json(report.as_json())
    else:
        show_report(report)


def version() -> None:
    """Show the version."""
    typer.echo(f"shoal {__version__}")


def print_version(requested: bool) -> None:
    """Callback of `--version`: print the version and exit."""
    if requested:
        version()
        raise typer.Exit
