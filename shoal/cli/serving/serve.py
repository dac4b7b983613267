"""`shoal serve` and `shoal config`, and the flags and settings that other commands share with them."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.completion import complete_model
from shoal.cli.flags import Codec, Json, Lexicon, Quantize
from shoal.errors import MissingExtra

if TYPE_CHECKING:
    from shoal.settings import ResolvedSettings, Settings

logger = logging.getLogger(__name__)

PANEL = "Serve"

Model = Annotated[
    str | None,
    typer.Option(
        help="Model: nano, s1-mini, s2-pro, OWNER/NAME, a directory, or random:tiny for random weights.",
        autocompletion=complete_model,
    ),
]
Device = Annotated[str | None, typer.Option(help="Device: auto, cpu, cuda, cuda:N or mps.")]
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


@dataclass(frozen=True)
class EngineFlags:
    """Engine settings of the commands that speak files."""

    model: Model = None
    codec: Codec = None
    device: Device = None
    slots: Slots = None
    lexicon: Lexicon = None
    file: File = None
    set: Set = None

    def settings(self) -> "Settings":
        flags = {name: value for name, value in vars(self).items() if name not in ("file", "set")}
        return resolve_settings(flags, self.file, self.set).settings


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(serve)
    app.command(rich_help_panel=PANEL)(config)


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
    """Print the URL and an example request, for a person at the terminal."""
    from shoal.server.run import client_url

    url = client_url(host, port)
    # Not --json, which the curl of Ubuntu 22.04 does not know.
    request = "-H 'Content-Type: application/json' -d '{\"text\": \"Hello there.\"}'"
    typer.echo(
        f"\nShoal serves {model} at {url}; open it in a browser, or:\n"
        f"  curl -f {url}/v1/tts {request} -o hello.wav\n"
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
        raise MissingExtra(f"this command needs {missing.name}: pip install 'shoal-tts[server]'") from None


def _shown(value: Any) -> Any:
    if isinstance(value, tuple):
        return [str(part) for part in value]
    return (
        value if isinstance(value, bool | int | float | str | None) else str(value)
    )  # paths, and secrets as asterisks
