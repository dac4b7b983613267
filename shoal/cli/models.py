"""Commands for models: pull, inspect, verify, quantize, random."""

import sys
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.flags import Codec, Device, Json, Quiet

PANEL = "Models"


def add_to(app: typer.Typer) -> None:
    for command in (pull, inspect, verify, quantize, random):
        app.command(rich_help_panel=PANEL)(command)


def pull(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Model: s1-mini, s2-pro or OWNER/NAME, optionally @REVISION.")
    ],
    to: Annotated[
        Path | None, typer.Option("--to", help="New directory to download to, instead of the Hugging Face cache.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Download a model from the Hugging Face Hub.

    The Fish models are gated: accept the licence on their page, then run `hf auth login` or set HF_TOKEN.

    Example: shoal pull s1-mini

    Example: shoal pull fishaudio/s2-pro --to ./s2-pro
    """
    from shoal.checkpoint.pull import Hub, pull
    from shoal.cli.tables import print_json

    pulled = pull(name, to=to, hub=Hub(progress=sys.stderr.isatty() and not quiet))
    if json:
        print_json({"directory": str(pulled.directory), "bytes": pulled.bytes, "checked": pulled.checked})
        return
    if not pulled.checked and not quiet:
        typer.echo("the hub cannot be reached; using the copy in the cache", err=True)
    typer.echo(pulled.directory)


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory or name.")],
    codec: Codec = None,
    json: Json = False,
) -> None:
    """Show the configuration of a model and parameters, dtypes and memory of its parts. Does not read the weights.

    Example: shoal inspect ./s2-pro

    Example: shoal inspect random:s1-mini --json
    """
    from shoal.checkpoint.inspect import as_json, inspect
    from shoal.cli.tables import print_json, show_inspection

    found = inspect(model, codec=codec)
    if json:
        print_json(as_json(found))
    else:
        show_inspection(found)
    if found.problems:
        raise found.problems[0]


def verify(
    directory: Annotated[Path, typer.Argument(metavar="GOLDEN_DIR", help="Directory laid out like tests/golden.")],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Group (s1/prefill) or family of groups (codec) to run; may be repeated."),
    ] = None,
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="Dtype to compute in: float32, bfloat16 or float16.")] = "float32",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Recompute stored examples and compare them with upstream's results. The exit code is 0 only if all agree.

    Example: shoal verify tests/golden

    Example: shoal verify tests/golden --device cuda --only codec
    """
    from shoal.cli.tables import progress_line, show_table
    from shoal.engine.load import choose_device, choose_dtype
    from shoal.tools.verify import as_json, as_table, require_all, verify

    where = choose_device(device)
    with progress_line(quiet or json) as progress:
        comparisons = verify(
            directory, device=where, dtype=choose_dtype(dtype, where), only=only or None, progress=progress
        )
    if json:
        typer.echo(as_json(comparisons))
    else:
        show_table(as_table(comparisons))
    require_all(comparisons)


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory or name.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write to; it must not exist yet.")],
    mode: Annotated[
        str,
        typer.Option(help="Quantization: int8, int4 or fp8 for the model, or per part: slow=int8,fast=fp8,codec=int8."),
    ] = "int8",
    quiet: Quiet = False,
) -> None:
    """Save a model with quantized weights, so that they need not be quantized at every start.

    Example: shoal quantize s1-mini --mode int8 -o ./s1-mini-int8

    Example: shoal quantize ./s2-pro --mode slow=int4,fast=int8,codec=int8 -o ./s2-pro-small
    """
    from shoal.checkpoint.find import find_directory
    from shoal.checkpoint.save import save_quantized
    from shoal.cli.tables import progress_line
    from shoal.quantize.modes import WeightModes

    modes, source, done = WeightModes.parse(mode), find_directory(model), count(1)
    with progress_line(quiet) as progress:
        save_quantized(source, output, modes, on_layer=lambda name: progress(f"{next(done)} matrices, {name}"))
    typer.echo(output)


def random(
    size: Annotated[str, typer.Argument(metavar="SIZE", help="Size of the model: tiny, tiny-s2, s1-mini or s2-pro.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write to; it must not exist yet.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
) -> None:
    """Save a model with random weights, for tests and speed measurements. Its audio is noise.

    Example: shoal random tiny ./tiny
    """
    from shoal.checkpoint.find import RANDOM_PREFIX
    from shoal.checkpoint.random import random_checkpoint
    from shoal.checkpoint.save import save_random

    save_random(directory, random_checkpoint(size.removeprefix(RANDOM_PREFIX), seed=seed))
    typer.echo(directory)
