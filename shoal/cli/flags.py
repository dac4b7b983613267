"""Flags that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Codec = Annotated[
    Path | None, typer.Option("--codec", help="Codec file, or a directory with one, instead of the model's own.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
