"""`shoal align`: attention heads for word times."""

from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.completion import complete_model
from shoal.cli.flags import Device, Json

if TYPE_CHECKING:
    from shoal.tools.calibrate import Calibration

PANEL = "Models"


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(help="Word times: find the attention heads of a model that follow the text.")
    group.command()(calibrate)
    app.add_typer(group, name="align", rich_help_panel=PANEL)


def calibrate(
    model: Annotated[
        str,
        typer.Argument(help="Model: nano, s1-mini, s2-pro, OWNER/NAME, or a directory.", autocompletion=complete_model),
    ],
    device: Device = "auto",
    sentences: Annotated[int, typer.Option(min=4, max=500, help="Sentences to speak.")] = 24,
    lead_frames: Annotated[
        float,
        typer.Option(min=-10, max=10, help="Frames by which attention is ahead of the sound; subtracted from times."),
    ] = 1.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the result without storing it.")] = False,
    json: Json = False,
) -> None:
    """Speak sentences, find the attention heads that follow the text, and store them in the model's shoal.json.

    Word times (`--subtitles`, `timestamps`) need this once per model; nano is calibrated already. The quality is the
    share of attention on the word that is spoken, times the share of words found. Exits with 12 if it is too low.

    Example: shoal align calibrate s1-mini
    """
    from dataclasses import asdict

    from shoal.checkpoint.find import RANDOM_PREFIX, find_directory
    from shoal.cli.tables import print_json
    from shoal.errors import InvalidRequest, VerificationFailed
    from shoal.tools.calibrate import MIN_QUALITY, store
    from shoal.tools.calibrate import calibrate as run

    if model.startswith(RANDOM_PREFIX) and not dry_run:
        raise InvalidRequest(f"{model} has no directory to store the result in: add --dry-run")
    result = run(model, device=device, sentences=sentences, lead_frames=lead_frames)
    path = None if dry_run else store(result, find_directory(model))
    if json:
        print_json({**asdict(result), "accepted": result.accepted, "stored": None if path is None else str(path)})
    else:
        _show(result)
    if not result.accepted:
        raise VerificationFailed(
            f"{model}: the attention of no head follows the text (quality {result.alignment.quality:.2f}, at least "
            f"{MIN_QUALITY} needed): word times are refused for this model"
        )
    if path is not None and not json:
        typer.echo(f"stored in {path}")


def _show(result: "Calibration") -> None:
    for each in result.best:
        typer.echo(f"layer {each.layer:2} head {each.head:2}: quality {each.quality:.3f}")
    heads = ", ".join(f"({layer}, {head})" for layer, head in result.alignment.heads) or "none"
    typer.echo(f"chosen: {heads}; quality {result.alignment.quality:.3f} over {result.sentences} sentences")
