"""The command `shoal say`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.checkpoint.find import BUNDLED
from shoal.cli.flag_groups import with_groups
from shoal.cli.flags import Json, Quiet
from shoal.cli.overwriting import refuse_overwriting
from shoal.cli.quick_exit import QuickExit
from shoal.cli.say import flags
from shoal.cli.say.numpy_import import import_numpy
from shoal.cli.say.options import (
    ReadingOptions,
    SamplingOptions,
    VoiceOption,
    check_model,
    check_output,
    check_subtitles,
    check_voice,
    parse_voice,
    read_text_option,
)
from shoal.cli.say.prosody import ProsodyOptions
from shoal.cli.say.sinks import AudioSinks
from shoal.cli.say.speak import EngineOptions, speak_here, speak_on_local_server

if TYPE_CHECKING:
    from shoal.cli.say.player import Player
    from shoal.speech import SpeechRequest

PANEL = "Speak"


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(with_groups(say))


def say(
    text: flags.Text = None,
    output: flags.Output = None,
    play: flags.Play = False,
    file: flags.TextFile = None,
    voice: flags.VoiceOrRecording = None,
    transcript: flags.Transcript = None,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    prosody: ProsodyOptions,
    reading: ReadingOptions,
    subtitles: flags.Subtitles = None,
    show_text: flags.ShowText = False,
    format: flags.Format = None,
    no_server: flags.NoServer = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Speak a text: play it or write it to a file while it is generated.

    A server of yours that has the model loaded (`shoal serve`) is used if there is one; it gives the same audio.

    Example: shoal say "The tide is coming in."

    Example: shoal say --file chapter.txt -o chapter.mp3 --play

    Example: fortune | shoal say -o fortune.opus

    Example: shoal say "The tide is coming in." -o tide.wav --subtitles tide.srt

    Example: shoal say "Hello." -o hello.wav --model s1-mini --voice me.wav --transcript "What I say in me.wav."
    """
    import_numpy()
    content, speaker = read_text_option(text, file), parse_voice(voice, transcript)
    overrides = sampling.given()
    request = reading.apply(replace(speaker.request(content), timestamps=subtitles is not None), engine.lexicon)
    if show_text:
        _show_text(request, engine.model, engine.lexicon, json=json)
        return
    check_output(output, format, json=json)
    check_subtitles(subtitles)
    recording = Path(voice) if voice is not None and transcript is not None else None
    refuse_overwriting((output, subtitles), file, recording)
    _check_speaker(speaker, engine.model)
    prosody.check()
    sinks = AudioSinks(output, format, _player(play or output is None), prosody, subtitles)
    _speak(engine, request, overrides, sinks, no_server=no_server, json=json, quiet=quiet)
    raise QuickExit


def _check_speaker(speaker: VoiceOption, model: str) -> None:
    """Raise ModelNotFound or VoiceNotFound before anything is loaded."""
    check_model(model)
    check_voice(speaker.name, model)
    if model == BUNDLED and speaker.recording is not None:
        typer.echo(
            "note: nano takes on only a part of a recorded voice; s1-mini and s2-pro follow it closely", err=True
        )


def _speak(
    options: EngineOptions,
    request: "SpeechRequest",
    overrides: dict[str, Any],
    sinks: AudioSinks,
    *,
    no_server: bool,
    json: bool,
    quiet: bool,
) -> None:
    """Speak with a progress line on standard error, then print the summary."""
    from shoal.cli.say.progress import SpeechProgress

    # A request with timestamps is spoken here: the server's route for plain audio returns no word times.
    here = no_server or request.timestamps
    with SpeechProgress(shown=not quiet) as progress:
        server = None if here else speak_on_local_server(options, request, overrides, sinks, progress, quiet=quiet)
        seed = speak_here(options, request, overrides, sinks, progress) if server is None else server.seed
    if json:
        from shoal.cli.tables import print_json

        facts = {"model": options.model, "seed": seed, "server": None if server is None else server.url}
        print_json({**sinks.as_json(), **facts, **progress.as_json()})
    elif not quiet:
        typer.echo(f"{sinks}: {progress}", err=True)


def _show_text(request: "SpeechRequest", model: str, lexicon: Path | None, *, json: bool) -> None:
    """Print the turns of a text, one per line. Reads the model's configuration, not its weights."""
    from dataclasses import asdict

    from shoal.checkpoint.format.text_rules import model_text_rules
    from shoal.cli.tables import print_json
    from shoal.text.lexicon import read_lexicon
    from shoal.text.plan import plan_text

    plan = plan_text(request, model_text_rules(model), lexicon=None if lexicon is None else read_lexicon(lexicon))
    if json:
        print_json({"text": plan.text, **asdict(plan)})
    else:
        typer.echo("\n".join(plan.lines()))


def _player(wanted: bool) -> "Player | None":
    if not wanted:
        return None
    from shoal.cli.say.player import find_player

    return find_player()
