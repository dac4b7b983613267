"""Outputs must not replace the files that a command reads."""

from collections.abc import Iterable
from itertools import product
from pathlib import Path

from shoal.errors import InvalidRequest


def refuse_overwriting(outputs: Iterable[Path | None], *inputs: Path | None) -> None:
    """Raise InvalidRequest if an output is the same file as one of the inputs, even under another name."""
    for output, source in product(outputs, inputs):
        if output is not None and source is not None and output.exists() and _same_file(output, source):
            raise InvalidRequest(f"{output} is read by this command and would be overwritten: write to another file")


def _same_file(output: Path, source: Path) -> bool:
    try:
        return output.samefile(source)
    except OSError:  # the source is not readable, which is reported when it is read
        return False
