"""`shoal say`: speak a text to a file or a player."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.completion import complete_model, complete_voice
from shoal.cli.flags import Codec, Device, Json, Lexicon, Quantize, Quiet
from shoal.cli.say_options import check_output, parse_voice, read_text_option, sampling_overrides
from shoal.errors import InvalidRequest

if TYPE_CHECKING:
    from shoal.audio.pcm import Samples
    from shoal.cli.player import Player
    from shoal.cli.speech_progress import SpeechProgress
    from shoal.engine.engine import Engine
    from shoal.speech import SpeechRequest

PANEL = "Speak"

Text = Annotated[str | None, typer.Argument(metavar="TEXT", help="Text to speak; - reads standard input.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File to write; - is standard output. Default: play the audio."),
]
Model = Annotated[
    str,
    typer.Option(
        help="Model: nano, s1-mini, s2-pro, OWNER/NAME, a directory, or random:tiny for random weights.",
        autocompletion=complete_model,
    ),
]
VoiceOrRecording = Annotated[
    str | None,
    typer.Option(
        help="Name of a stored voice, or a recording to clone (with --transcript).", autocompletion=complete_voice
    ),
]
Repetition = Annotated[
    str | None,
    typer.Option(
        help="Tokens that the repetition penalty considers: upstream (as in the release) or window (recent frames)."
    ),
]
AsWritten = Annotated[
    bool,
    typer.Option("--as-written", help="Do not spell out numbers and symbols, even for models that expect it."),
]


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(say)


def say(
    text: Text = None,
    output: Output = None,
    play: Annotated[bool, typer.Option("--play", help="Also play the audio when writing it to a file.")] = False,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Text file to speak (UTF-8).")] = None,
    model: Model = "nano",
    codec: Codec = None,
    voice: VoiceOrRecording = None,
    transcript: Annotated[str | None, typer.Option(help="Words spoken in the recording given with --voice.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed; the same seed gives the same audio.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature, 0 to 2; lower varies less. Default: the model's.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus sampling, above 0 up to 1; lower varies less. Default: the model's.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the K likeliest tokens; 0 is all. Default: the model's.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Repetition penalty, up to 2; 1 disables it. S1 only. Default: the model's.")
    ] = None,
    repetition: Repetition = None,
    max_frames: Annotated[
        int | None,
        typer.Option(help="Maximum frames per turn (about a sentence); 0 is as many as the context holds."),
    ] = None,
    as_written: AsWritten = False,
    ssml: Annotated[
        bool | None,
        typer.Option("--ssml/--no-ssml", help="Whether the text is SSML. Default: if it begins with <speak>."),
    ] = None,
    lexicon: Lexicon = None,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="Print the text as the model reads it, and do not speak.")
    ] = False,
    format: Annotated[
        str | None,
        typer.Option(
            help="Audio format: wav, flac, mp3, opus, aac, webm, pcm, ulaw or alaw. Default: by the suffix of --output."
        ),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="Dtype: float32, bfloat16 or float16. Default: by device.")] = None,
    quantize: Quantize = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Speak a text: play it or write it to a file while it is generated.

    Example: shoal say "The tide is coming in."

    Example: shoal say --file chapter.txt -o chapter.mp3 --play

    Example: fortune | shoal say -o fortune.opus

    Example: shoal say "Hello." -o hello.wav --model s1-mini --voice me.wav --transcript "What I say in me.wav."
    """
    content, speaker = read_text_option(text, file), parse_voice(voice, transcript)
    overrides = sampling_overrides(
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        repetition=repetition,
        max_frames=max_frames,
    )
    if lexicon is not None and as_written:
        raise InvalidRequest("--lexicon changes the text and --as-written does not: use one of them")
    if show_text:
        _show_text(replace(speaker.request(content), normalize=not as_written, ssml=ssml), model, lexicon, json=json)
        return
    check_output(output, format, json=json)
    if model == "nano" and speaker.recording is not None:
        typer.echo("note: nano barely clones voices; use its built-in voices, or s1-mini or s2-pro to clone", err=True)
    sinks = AudioSinks(output, format, _player(play or output is None))

    from shoal.cli.speech_progress import SpeechProgress
    from shoal.cli.tables import print_json

    with SpeechProgress(shown=not quiet) as progress, _engine(model, codec, device, dtype, quantize, lexicon) as engine:
        sampling = replace(engine.service.default_sampling, **overrides)
        request = replace(speaker.request(content), sampling=sampling, normalize=not as_written, ssml=ssml)
        _speak(engine, request, sinks, progress)
    if json:
        print_json({**sinks.as_json(), "model": model, "seed": sampling.seed, **progress.as_json()})
    elif not quiet:
        typer.echo(f"{sinks}: {progress}", err=True)


@dataclass(frozen=True)
class AudioSinks:
    """Destinations of the audio: a file, a player, or both."""

    output: Path | None
    format: str | None
    player: "Player | None"

    def open(self, stack: ExitStack, sample_rate: int) -> "list[Callable[[Samples], None]]":
        """Open the destinations on `stack` and return the functions that write samples to them."""
        from shoal.audio.write import AudioFile
        from shoal.cli.player import playing

        writers: list[Callable[[Samples], None]] = []
        if self.player is not None:
            writers.append(stack.enter_context(playing(self.player, sample_rate)))
        # The file is opened last and so closed first: it is complete before playback has finished.
        if self.output is not None:
            writers.append(stack.enter_context(AudioFile(self.output, sample_rate, format=self.format)).write)
        return writers

    def as_json(self) -> dict[str, object]:
        player = None if self.player is None else self.player.name
        return {"output": None if self.output is None else str(self.output), "player": player}

    def __str__(self) -> str:
        return str(self.output) if self.output is not None else self.player.name if self.player is not None else ""


def _show_text(request: "SpeechRequest", model: str, lexicon: Path | None, *, json: bool) -> None:
    """Print the turns of a text, one per line. Reads the model's configuration, not its weights."""
    from dataclasses import asdict

    from shoal.checkpoint.text_rules import model_text_rules
    from shoal.cli.tables import print_json
    from shoal.text.lexicon import read_lexicon
    from shoal.text.plan import plan_text

    plan = plan_text(request, model_text_rules(model), lexicon=None if lexicon is None else read_lexicon(lexicon))
    if json:
        print_json({"text": plan.text, **asdict(plan)})
    else:
        typer.echo("\n".join(plan.lines()))


def _engine(
    model: str, codec: Path | None, device: str, dtype: str | None, quantize: str | None, lexicon: Path | None
) -> "Engine":
    from shoal import load
    from shoal.config import EngineConfig

    config = EngineConfig(quantize=quantize or EngineConfig.quantize)
    return load(model, device=device, dtype=dtype, codec=codec, config=config, lexicon=lexicon)


def _speak(engine: "Engine", request: "SpeechRequest", sinks: AudioSinks, progress: "SpeechProgress") -> None:
    with ExitStack() as stack:
        writers = sinks.open(stack, engine.sample_rate)
        progress.begin()
        speaking = engine.service.speak_blocking(request)
        for chunk in speaking:
            for write in writers:
                write(chunk.samples)
            progress.record(chunk, *speaking.turn)
        if sinks.player is not None:
            progress.show_playing()


def _player(wanted: bool) -> "Player | None":
    if not wanted:
        return None
    from shoal.cli.player import find_player

    return find_player()
