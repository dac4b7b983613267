"""Where a measurement goes: tables to the terminal, the document and its reports to files."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.errors import OutputError

if TYPE_CHECKING:
    from shoal.tools.bench.document import Document

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything measured to a file.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report that opens in any browser.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the tables as Markdown.")]

INTERRUPTED = 130


def check_writable(*files: Path | None) -> None:
    """Raises OutputError for files that could not be written: better now than after the measurement."""
    for file in files:
        if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
            raise OutputError(f"{file} cannot be written: name a file in a directory that is there and yours")


def report_output(
    document: "Document", json: Path | None, html: Path | None, markdown: Path | None, *, quiet: bool = False
) -> None:
    """What was measured is written first of all; an interrupted measurement then ends the command with 130."""
    from shoal.tools.bench.document import write_document

    try:
        if json is not None:
            write_document(json, document)
        write_reports([document], html, markdown)
    finally:
        if not quiet:
            show([document])  # also what could not be written
    if not document["complete"]:
        typer.echo("interrupted: this is what was measured until then", err=True)
        raise typer.Exit(INTERRUPTED)


def write_reports(documents: list["Document"], html: Path | None, markdown: Path | None) -> None:
    from shoal.tools.bench.document import write_text

    if html is not None:
        from shoal.tools.bench.report.page import page

        write_text(html, page(documents))
    if markdown is not None:
        from shoal.tools.bench.report.markdown import markdown as as_markdown

        write_text(markdown, as_markdown(documents))


def show(documents: list["Document"]) -> None:
    """Tables as wide as they are where nobody sees the edge of a terminal."""
    from rich.console import Console

    from shoal.tools.bench.report.tables import tables

    console = Console() if Console().is_terminal else Console(width=180)
    for document in documents:
        for sheet in tables(document):
            console.print(sheet.rich())
