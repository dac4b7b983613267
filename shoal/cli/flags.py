"""Flags shared by several commands."""

import os
from pathlib import Path
from typing import Annotated

import typer

from shoal.errors import TextError

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


def utf8_text(param: typer.CallbackParam, text: str | None) -> str | None:
    """Return the text of an argument, decoded as UTF-8 where the locale could not decode it. Raises TextError.

    Python decodes arguments by the locale, which is ASCII in some containers and cron jobs.
    """
    if text is None or not any("\udc80" <= letter <= "\udcff" for letter in text):
        return text
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError as error:
        raise TextError(
            f"{param.metavar or param.opts[0]} is not UTF-8 text: invalid byte at offset {error.start}"
        ) from None
