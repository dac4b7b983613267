"""`shoal keys`: create, list and revoke API keys."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import Json, Lexicon
from shoal.cli.serving.serve import PANEL, resolve_settings

if TYPE_CHECKING:
    from shoal.api.keys import KeyFile

KeysFile = Annotated[Path | None, typer.Option("--file", help="Key file. Default: the file that `shoal serve` reads.")]


def add_to(app: typer.Typer) -> None:
    keys = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys.")
    keys.command("new")(new_key)
    keys.command("list")(list_keys)
    keys.command("revoke")(revoke_key)
    app.add_typer(keys, name="keys", rich_help_panel=PANEL)


def new_key(
    name: Annotated[str, typer.Argument(help="Name of the key, for example its owner.")],
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Requests per minute for this key. Default: the limit of the server.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Concurrent requests for this key. Default: the limit of the server.")
    ] = None,
    daily_audio_seconds: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds of audio per day (UTC) for this key. Default: the limit of the server."),
    ] = None,
    lexicon: Lexicon = None,
    file: KeysFile = None,
    json: Json = False,
) -> None:
    """Create an API key and print it once; only its hash is stored.

    Example: shoal keys new alice --concurrency 4
    """
    keys = _key_file(file)
    from shoal.api.config import KeyLimits
    from shoal.cli.tables import print_json

    secret = keys.create(name, KeyLimits(requests_per_minute, concurrency, daily_audio_seconds), lexicon)
    if json:
        print_json({"name": name, "key": secret, "file": str(keys.path)})
        return
    typer.echo(secret)
    typer.echo(f"stored as a hash in {keys.path}; the key cannot be shown again", err=True)
    if len(keys.read()) == 1:
        typer.echo("this is the first key: servers that read the file now refuse requests without a key", err=True)


def list_keys(file: KeysFile = None, json: Json = False) -> None:
    """List the keys and their limits.

    Example: shoal keys list
    """
    from dataclasses import asdict

    from shoal.cli.tables import print_json

    entries = [{"name": key.name, "created": key.created, **asdict(key.limits)} for key in _key_file(file).read()]
    if json:
        print_json({"keys": entries})
        return
    if not entries:
        typer.echo("no keys; `shoal keys new NAME` creates one", err=True)
    for entry in entries:
        limits = ", ".join(f"{name} {value:g}" for name, value in entry.items() if isinstance(value, int | float))
        typer.echo(f"{entry['name']}\t{entry['created']}\t{limits or 'limits of the server'}")


def revoke_key(name: Annotated[str, typer.Argument(help="Name of the key.")], file: KeysFile = None) -> None:
    """Revoke a key. A running server rejects it within seconds.

    Example: shoal keys revoke alice
    """
    keys = _key_file(file)
    keys.revoke(name)
    if not keys.read():
        hint = f"to serve without keys, delete {keys.path} and restart them"
        typer.echo(f"no key is left: servers without other keys refuse every request; {hint}", err=True)


def _key_file(file: Path | None) -> "KeyFile":
    origin = resolve_settings({}, None, None)
    from shoal.api.keys import KeyFile
    from shoal.paths import config_directory

    return KeyFile(file or origin.settings.keys_file or config_directory() / "keys.json")
