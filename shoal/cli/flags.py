"""Flags shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer

Codec = Annotated[
    Path | None,
    typer.Option("--codec", help="Codec file, or a directory that contains one, instead of the model's own codec."),
]
Device = Annotated[str, typer.Option("--device", help="Device: auto, cpu, cuda, cuda:N or mps.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Lexicon = Annotated[
    Path | None,
    typer.Option("--lexicon", help="Pronunciation lexicon: a table (word = reading) or a W3C PLS document."),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="Weight quantization: auto, none, int8, int4, fp8, w8a8, or per part, such as slow=int8,codec=int8.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
