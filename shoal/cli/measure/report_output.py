"""Output of a measurement: tables on the terminal, the document and its reports as files."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import Quiet
from shoal.errors import OutputError

if TYPE_CHECKING:
    from shoal.tools.bench.document import Document

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write all measurements to a JSON file, for `shoal report`."),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a report with charts to one HTML file (needs matplotlib)."),
]
Markdown = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="Write the tables to a Markdown file.")
]

INTERRUPTED = 130


@dataclass(frozen=True)
class ReportFlags:
    """Destinations of the results of a measurement."""

    json: JsonFile = None
    html: Html = None
    markdown: Markdown = None
    quiet: Quiet = False

    def check_writable(self) -> None:
        """Raise OutputError for a file that cannot be written, and MissingExtra for a report that cannot be drawn.

        Called before the measurement starts.
        """
        if self.html is not None:
            from shoal.tools.bench.report.plots import require_matplotlib

            require_matplotlib()
        for file in (self.json, self.html, self.markdown):
            if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
                raise OutputError(f"{file} cannot be written: give a file in a directory that exists and is writable")

    def write(self, document: "Document") -> None:
        """Write the document and its reports, then print the tables. Exits with code 130 after an interrupted run."""
        from shoal.tools.bench.document import write_document

        try:
            if self.json is not None:
                write_document(self.json, document)
            write_reports([document], self.html, self.markdown)
        finally:
            if not self.quiet:
                show([document])  # even if a file could not be written: the measurement must not be lost
        if not document["complete"]:
            typer.echo("interrupted: the report covers the finished measurements only", err=True)
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
    """Print the tables of every document, 180 characters wide if standard output is not a terminal."""
    from rich.console import Console

    from shoal.tools.bench.report.markdown import busy_warning
    from shoal.tools.bench.report.tables import tables

    console = Console() if Console().is_terminal else Console(width=180)
    for document in documents:
        if warning := busy_warning(document):
            console.print(f"warning: {warning}", highlight=False, markup=False)
        for sheet in tables(document):
            console.print(sheet.rich())
