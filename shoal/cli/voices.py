"""Commands about stored voices: recordings kept under a name, which every command and the server can use."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.completion import complete_voice
from shoal.cli.flags import Json

if TYPE_CHECKING:
    from shoal.voices.store import VoiceStore

PANEL = "Speak"

Directory = Annotated[
    Path | None, typer.Option("--voices", help="Directory of voices; else the one that `say` and `serve` read.")
]
Name = Annotated[str, typer.Argument(help="Letters, digits, - and _.", autocompletion=complete_voice)]


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Keep recordings as voices, list and remove them.")
    group.command("add")(add)
    group.command("list")(list_voices)
    group.command("rename")(rename)
    group.command("remove")(remove)
    app.add_typer(group, name="voices", rich_help_panel=PANEL)


def add(
    name: Annotated[str, typer.Argument(help="Letters, digits, - and _.")],
    recording: Annotated[Path, typer.Argument(help="10 to 30 seconds of one speaker, in any audio format.")],
    transcript: Annotated[str, typer.Option(help="What is said in the recording, word for word.")],
    voices: Directory = None,
) -> None:
    """Keep a recording as a voice.

    Example: shoal voices add narrator me.wav --transcript "What I say in me.wav."
    """
    _store(voices).add(name, recording, transcript)
    # Not with nano, which is the usual model: it has voices of its own.
    typer.echo(f'{name} was added; try it: shoal say "Hello." --voice {quote(name)} --model s1-mini', err=True)


def list_voices(voices: Directory = None, json: Json = False) -> None:
    """List the stored voices and those that come with nano.

    Example: shoal voices list
    """
    from shoal.cli.tables import print_json

    store = _store(voices)
    known = [{"name": name, "builtin": store.is_builtin(name)} for name in store.names()]
    if json:
        print_json({"voices": known})
        return
    for voice in known:
        typer.echo(f"{voice['name']}{'  (comes with nano)' if voice['builtin'] else ''}")
    if not known:
        typer.echo("no voices yet: shoal voices add NAME RECORDING --transcript TEXT", err=True)


def rename(
    old: Name,
    new: Annotated[str, typer.Argument(help="A name that is free.")],
    voices: Directory = None,
) -> None:
    """Give a voice another name.

    Example: shoal voices rename narrator grandfather
    """
    _store(voices).rename(old, new)
    typer.echo(f"{old} is {new} now", err=True)


def remove(name: Name, voices: Directory = None) -> None:
    """Remove a voice with its recordings.

    Example: shoal voices remove narrator
    """
    _store(voices).delete(name)
    typer.echo(f"{name} was removed", err=True)


def _store(directory: Path | None) -> "VoiceStore":
    from shoal.checkpoint.find import BUNDLED_DIRECTORY
    from shoal.voices.store import VoiceStore, voice_directory

    bundled = BUNDLED_DIRECTORY / "voices"
    return VoiceStore(directory or voice_directory(), (bundled,) if bundled.is_dir() else ())
