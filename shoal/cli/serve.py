"""`shoal serve`, `shoal config` and `shoal keys`."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.completion import complete_model
from shoal.cli.flags import Codec, Json, Lexicon, Quantize
from shoal.errors import MissingExtra

if TYPE_CHECKING:
    from shoal.api.keys import KeyFile
    from shoal.settings import ResolvedSettings

logger = logging.getLogger(__name__)

PANEL = "Serve"

Model = Annotated[
    str | None,
    typer.Option(
        help="Model: nano, s1-mini, s2-pro, OWNER/NAME, a directory, or random:tiny for random weights.",
        autocompletion=complete_model,
    ),
]
Device = Annotated[str | None, typer.Option(help="Device: auto, cpu, cuda or cuda:INDEX.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free port.")]
Wyoming = Annotated[
    int | None,
    typer.Option("--wyoming", metavar="PORT", help="Port for Home Assistant's Wyoming protocol. Default: not served."),
]
Slots = Annotated[int | None, typer.Option(help="Maximum batch size: sequences generated concurrently.")]
KvDtype = Annotated[str | None, typer.Option("--kv-dtype", help="Dtype of the KV cache: auto, int8 or fp8.")]
GpuMemory = Annotated[
    str | None,
    typer.Option("--gpu-memory", help="GPU memory limit: a fraction of the GPU (0.9) or an amount (4GB)."),
]
Insecure = Annotated[bool | None, typer.Option("--insecure", help="Accept requests without an API key on any address.")]
File = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other setting, listed by `shoal config`; may be repeated."),
]
KeysFile = Annotated[Path | None, typer.Option("--file", help="Key file. Default: the file that `shoal serve` reads.")]


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(serve)
    app.command(rich_help_panel=PANEL)(config)
    keys = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys.")
    keys.command("new")(new_key)
    keys.command("list")(list_keys)
    keys.command("revoke")(revoke_key)
    app.add_typer(keys, name="keys", rich_help_panel=PANEL)


def serve(
    model: Model = None,
    codec: Codec = None,
    device: Device = None,
    host: Host = None,
    port: Port = None,
    wyoming: Wyoming = None,
    slots: Slots = None,
    quantize: Quantize = None,
    kv_dtype: KvDtype = None,
    gpu_memory: GpuMemory = None,
    insecure: Insecure = None,
    lexicon: Lexicon = None,
    file: File = None,
    set: Set = None,
) -> None:
    """Serve the Fish, OpenAI, ElevenLabs and SageMaker APIs over HTTP until SIGINT or SIGTERM.

    Example: shoal serve

    Example: shoal serve --model s1-mini --port 9000 --slots 32

    Example: shoal keys new alice && shoal serve --host 0.0.0.0
    """
    flags = {"model": model, "codec": codec, "device": device, "host": host, "port": port, "slots": slots}
    flags |= {"quantize": quantize, "kv_dtype": kv_dtype, "gpu_memory": gpu_memory, "insecure": insecure}
    flags |= {"wyoming_port": wyoming, "lexicon": lexicon}
    origin = resolve_settings(flags, file, set)
    with server_extra():
        from shoal.server.logging import set_up_logging
        from shoal.server.run import serve

    set_up_logging(origin.settings.log_format, origin.settings.log_level)
    for notice in origin.notices():
        logger.warning(notice)
    settings = origin.settings
    announce = partial(print_address, model=settings.model) if sys.stderr.isatty() else None
    serve(settings.server(), settings.source(), settings.voice_directory(), announce)


def print_address(host: str, port: int, model: str) -> None:
    """Print where the server can be reached and how to speak with it, for a person at the terminal."""
    from shoal.server.run import client_url

    url = client_url(host, port)
    typer.echo(
        f"\nShoal serves {model} at {url}; open it in a browser, or:\n"
        f'  curl {url}/v1/tts --json \'{{"text": "Hello there."}}\' --output hello.wav\n'
        f"API: {url}/docs. Stop with Ctrl-C.\n",
        err=True,
    )


def config(
    model: Model = None,
    device: Device = None,
    host: Host = None,
    port: Port = None,
    slots: Slots = None,
    file: File = None,
    set: Set = None,
    json: Json = False,
) -> None:
    """Show the settings that `shoal serve` would use and the source of each. Secrets are masked.

    Example: SHOAL_PORT=9000 shoal config
    """
    flags = {"model": model, "device": device, "host": host, "port": port, "slots": slots}
    origin = resolve_settings(flags, file, set)
    from shoal.cli.tables import print_json, show_table
    from shoal.settings import default_keys_file

    shown, places = {name: _shown(value) for name, value in origin.settings}, dict(origin.sources)
    # The default key file is used whenever it exists, without being configured.
    if origin.settings.keys_file is None and (found := default_keys_file()) is not None:
        shown["keys_file"], places["keys_file"] = str(found), "default file"
    if json:
        print_json({name: {"value": value, "from": places[name]} for name, value in shown.items()})
        return
    from rich.table import Table

    table = Table("setting", "value", "from")
    for name, value in shown.items():
        table.add_row(name, "" if value is None else str(value), places[name])
    show_table(table)


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
    _key_file(file).revoke(name)


def resolve_settings(flags: dict[str, Any], file: Path | None, others: list[str] | None) -> "ResolvedSettings":
    """Merge flags and `--set NAME=VALUE` values with file and environment; records the source of every setting."""
    for other in others or ():
        name, equals, value = other.partition("=")
        if not equals:
            raise typer.BadParameter(f"{other!r} is not of the form NAME=VALUE", param_hint="--set")
        flags[name] = value
    with server_extra():
        from shoal.settings import read_settings

    return read_settings(flags, file)


@contextmanager
def server_extra() -> Iterator[None]:
    """Turn a failed import within the block into MissingExtra with the install command."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise MissingExtra(f"serving needs {missing.name}: pip install 'shoal-tts[server]'") from None


def _key_file(file: Path | None) -> "KeyFile":
    origin = resolve_settings({}, None, None)
    from shoal.api.keys import KeyFile
    from shoal.paths import config_directory

    return KeyFile(file or origin.settings.keys_file or config_directory() / "keys.json")


def _shown(value: Any) -> Any:
    if isinstance(value, tuple):
        return [str(part) for part in value]
    return str(value) if isinstance(value, Path) else value
