"""Flags that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Codec = Annotated[
    Path | None, typer.Option("--codec", help="Codec file, or a directory with one, instead of the model's own.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quantize = Annotated[
    str | None, typer.Option("--quantize", help="Weights: auto, none, int8, int4, fp8, or slow=int8,codec=int8.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
