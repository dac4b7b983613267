"""`shoal voices`: manage stored voices, which all commands and the server can use by name."""

from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.completion import complete_stored_voice
from shoal.cli.flags import Json, utf8_text

if TYPE_CHECKING:
    from shoal.voices.store import VoiceStore

PANEL = "Speak"

Directory = Annotated[
    Path | None,
    typer.Option("--voices", help="Directory of stored voices. Default: the one that `say` and `serve` read."),
]
Name = Annotated[str, typer.Argument(help="Name of the stored voice.", autocompletion=complete_stored_voice)]


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Add, list, describe, rename and remove stored voices.")
    group.command("add")(add)
    group.command("list")(list_voices)
    group.command("describe")(describe)
    group.command("rename")(rename)
    group.command("remove")(remove)
    app.add_typer(group, name="voices", rich_help_panel=PANEL)


def add(
    name: Annotated[str, typer.Argument(help="Name of the voice: letters, digits, - and _.")],
    recording: Annotated[Path, typer.Argument(help="Audio file with 10 to 30 seconds of one speaker, in any format.")],
    transcript: Annotated[
        str | None,
        typer.Option(
            help="Words spoken in the recording, verbatim. Default: by an English recogniser, if installed.",
            callback=utf8_text,
        ),
    ] = None,
    voices: Directory = None,
) -> None:
    """Store a recording as a voice.

    Example: shoal voices add narrator me.wav --transcript "What I say in me.wav."
    """
    if transcript is None:
        transcript = _transcribe(recording)
    store = _store(voices)
    report = store.check(recording, transcript)
    store.add(name, recording, transcript)
    for finding in report.findings:
        typer.echo(f"warning: {finding.message}", err=True)
    typer.echo(f'added {name}; try it: shoal say "Hello." --voice {quote(name)}', err=True)
    typer.echo("note: nano takes on only a part of a recorded voice; --model s1-mini follows it closely", err=True)


def list_voices(voices: Directory = None, json: Json = False) -> None:
    """List the stored voices and the built-in voices of nano.

    Example: shoal voices list
    """
    from shoal.cli.tables import print_json

    store = _store(voices)
    known = [
        {"name": name, "builtin": store.is_builtin(name), **asdict(store.description(name))} for name in store.names()
    ]
    if json:
        print_json({"voices": known})
        return
    width = max((len(voice["name"]) for voice in known), default=0)
    for voice in known:
        typer.echo(f"{voice['name']:{width}}  {_words(voice)}".rstrip())
    if not known:
        typer.echo("no voices stored; add one: shoal voices add NAME RECORDING --transcript TEXT", err=True)


def describe(
    name: Name,
    title: Annotated[str | None, typer.Option(help="Name to display, such as Anna.", callback=utf8_text)] = None,
    description: Annotated[
        str | None, typer.Option(help="Character and use of the voice, one line.", callback=utf8_text)
    ] = None,
    gender: Annotated[str | None, typer.Option(help="female, male or neutral.")] = None,
    accent: Annotated[str | None, typer.Option(help="Accent, such as British.", callback=utf8_text)] = None,
    preview: Annotated[
        str | None, typer.Option(help="Sentence that the preview on the web page speaks.", callback=utf8_text)
    ] = None,
    voices: Directory = None,
) -> None:
    """Set the description of a stored voice for lists and the web page; omitted fields do not change.

    Example: shoal voices describe narrator --title Anna --gender female --accent Irish
    """
    store = _store(voices)
    given = {"title": title, "description": description, "gender": gender, "accent": accent, "preview": preview}
    store.describe(
        name, replace(store.description(name), **{key: value for key, value in given.items() if value is not None})
    )
    typer.echo(f"described {name}", err=True)


def rename(
    old: Name,
    new: Annotated[str, typer.Argument(help="New name, not yet in use.")],
    voices: Directory = None,
) -> None:
    """Rename a stored voice.

    Example: shoal voices rename narrator grandfather
    """
    _store(voices).rename(old, new)
    typer.echo(f"renamed {old} to {new}", err=True)


def remove(name: Name, voices: Directory = None) -> None:
    """Remove a stored voice and its recordings.

    Example: shoal voices remove narrator
    """
    _store(voices).delete(name)
    typer.echo(f"removed {name}", err=True)


def _words(voice: dict[str, Any]) -> str:
    """Return the description of a voice as one line of a list."""
    facts = ", ".join(voice[key] for key in ("title", "gender", "accent") if voice[key])
    origin = "(built into nano)" if voice["builtin"] else ""
    return "  ".join(part for part in (facts, voice["description"], origin) if part)


def _transcribe(recording: Path) -> str:
    from shoal.voices.transcriber import Transcriber, transcribe_recording

    transcript = transcribe_recording(Transcriber(), recording, "--transcript")
    typer.echo(f"transcript: {transcript}\nif it is wrong, remove the voice and add it with --transcript", err=True)
    return transcript


def _store(directory: Path | None) -> "VoiceStore":
    from shoal.checkpoint.find import BUNDLED_DIRECTORY
    from shoal.voices.store import VoiceStore, voice_directory

    bundled = BUNDLED_DIRECTORY / "voices"
    return VoiceStore(directory or voice_directory(), (bundled,) if bundled.is_dir() else ())
