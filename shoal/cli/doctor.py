"""Commands about this machine and this build."""

from typing import Annotated

import typer

from shoal import __version__

PANEL = "This machine"


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(doctor)
    app.command(rich_help_panel=PANEL)(version)


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Show how many voices common cards hold.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Also try torch.compile; up to half a minute.")] = False,
) -> None:
    """Show what this machine has, what is missing, and what will be used and why.

    Example: shoal doctor

    Example: shoal doctor --plan
    """
    from shoal.cli.tables import print_json, show_plan, show_report
    from shoal.tools.doctor import examine

    if plan:
        from dataclasses import asdict

        from shoal.engine.memory.capacity import capacity_table

        holdings = capacity_table()
        if json:
            print_json({"cards": [asdict(holding) for holding in holdings]})
        else:
            show_plan(holdings)
        return
    report = examine(compile=compile)
    if json:
        print_json(report.as_json())
    else:
        show_report(report)


def version() -> None:
    """Show the version."""
    typer.echo(f"shoal {__version__}")


def print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit
