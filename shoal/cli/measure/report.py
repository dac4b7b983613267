"""`shoal report`: show stored measurements and compare two of them."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.measure.report_output import Html, Markdown, show, write_reports

PANEL = "Measure"


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(report)


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Files written by `bench --json`, `load --json` and `profile --json`."),
    ],
    html: Html = None,
    markdown: Markdown = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 12 if any metric got worse.")] = False,
) -> None:
    """Show stored measurements; of two or more of the same kind, show what changed beyond noise.

    Example: shoal report bench.json load.json --html report.html

    Example: shoal report before.json after.json --strict
    """
    from rich.console import Console

    from shoal.errors import VerificationFailed, counted
    from shoal.tools.bench.document import read_document
    from shoal.tools.bench.report.compare import pairs
    from shoal.tools.bench.report.tables import changes_table

    documents = [read_document(file) for file in files]
    compared = pairs(documents)
    write_reports(documents, html, markdown)
    if not compared:
        show(documents)
    console = Console() if Console().is_terminal else Console(width=180)
    for comparison in compared:
        console.print(changes_table(comparison).rich())
        for remark in comparison.remarks:
            console.print(f"note: {remark}", highlight=False, markup=False)
        console.print(comparison.in_short, highlight=False)
    worse = [change for comparison in compared for change in comparison.worse]
    if strict and worse:
        metrics = counted(len(worse), "metric")
        raise VerificationFailed(f"{metrics} got worse; the first is {worse[0].metric} of {worse[0].run}")
