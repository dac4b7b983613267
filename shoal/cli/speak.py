"""Commands that speak."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.completion import complete_model, complete_voice
from shoal.cli.flags import Codec, Device, Json, Quantize, Quiet
from shoal.cli.say_options import check_output, parse_voice, read_text_option, sampling_overrides

if TYPE_CHECKING:
    from shoal.audio.pcm import Samples
    from shoal.cli.player import Player
    from shoal.cli.speech_progress import SpeechProgress
    from shoal.engine.engine import Engine
    from shoal.speech import SpeechRequest

PANEL = "Speak"

Text = Annotated[str | None, typer.Argument(metavar="TEXT", help="What to say; - is standard input.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="File to write; - is standard output. Without it: play.")
]
Model = Annotated[
    str,
    typer.Option(help="nano, s1-mini, s2-pro, OWNER/NAME, a directory or random:tiny.", autocompletion=complete_model),
]
VoiceOrRecording = Annotated[
    str | None,
    typer.Option(help="A recording to imitate, or the name of a stored voice.", autocompletion=complete_voice),
]
Repetition = Annotated[
    str | None, typer.Option(help="What the penalty looks at: upstream (as released) or window (as meant).")
]
AsWritten = Annotated[
    bool, typer.Option("--as-written", help="Do not spell out numbers and symbols, even if the model needs it.")
]


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(say)


def say(
    text: Text = None,
    output: Output = None,
    play: Annotated[bool, typer.Option("--play", help="Play the audio, besides writing it.")] = False,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Say what is in this file.")] = None,
    model: Model = "nano",
    codec: Codec = None,
    voice: VoiceOrRecording = None,
    transcript: Annotated[str | None, typer.Option(help="What is said in that recording.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same audio.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 to 2; lower is steadier.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Up to 1; lower is steadier.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the likeliest so many; 0 is all.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Up to 2; 1 is none. S1 only.")] = None,
    repetition: Repetition = None,
    max_frames: Annotated[
        int | None, typer.Option(help="Most frames of a turn, which is about a sentence; 0 is what fits.")
    ] = None,
    as_written: AsWritten = False,
    format: Annotated[str | None, typer.Option(help="wav, flac, mp3, opus, aac, webm, pcm; else by suffix.")] = None,
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; else what suits.")] = None,
    quantize: Quantize = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say a text: play it, or write it to a file, while it is made.

    Example: shoal say "The tide is coming in."

    Example: shoal say --file chapter.txt -o chapter.mp3 --play

    Example: fortune | shoal say -o fortune.opus

    Example: shoal say "Hello." -o hello.wav --model s1-mini --voice me.wav --transcript "What I say in me.wav."
    """
    words, speaker = read_text_option(text, file), parse_voice(voice, transcript)
    wishes = sampling_overrides(
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        repetition=repetition,
        max_frames=max_frames,
    )
    check_output(output, format, json=json)
    if model == "nano" and speaker.recording is not None:
        typer.echo("note: nano has voices of its own and hardly imitates others; S1-mini and S2-Pro do", err=True)
    ears = AudioSinks(output, format, _player(play or output is None))

    from shoal.cli.speech_progress import SpeechProgress
    from shoal.cli.tables import print_json

    with SpeechProgress(shown=not quiet) as meter, _engine(model, codec, device, dtype, quantize) as engine:
        sampling = replace(engine.service.default_sampling, **wishes)
        _speak(engine, replace(speaker.request(words, sampling), normalize=not as_written), ears, meter)
    if json:
        print_json({**ears.as_json(), "model": model, "seed": sampling.seed, **meter.as_json()})
    elif not quiet:
        typer.echo(f"{ears}: {meter}", err=True)


@dataclass(frozen=True)
class AudioSinks:
    """Where the audio goes: a file, a player, or both."""

    output: Path | None
    format: str | None
    player: "Player | None"

    def open(self, stack: ExitStack, sample_rate: int) -> "list[Callable[[Samples], None]]":
        from shoal.audio.write import AudioFile
        from shoal.cli.player import playing

        listeners: list[Callable[[Samples], None]] = []
        if self.player is not None:
            listeners.append(stack.enter_context(playing(self.player, sample_rate)))
        # Closed first: the file is complete when its last sample is made, not when the last sound is heard.
        if self.output is not None:
            listeners.append(stack.enter_context(AudioFile(self.output, sample_rate, format=self.format)).write)
        return listeners

    def as_json(self) -> dict[str, object]:
        player = None if self.player is None else self.player.name
        return {"output": None if self.output is None else str(self.output), "player": player}

    def __str__(self) -> str:
        return str(self.output) if self.output is not None else self.player.name if self.player is not None else ""


def _engine(model: str, codec: Path | None, device: str, dtype: str | None, quantize: str | None) -> "Engine":
    from shoal import load
    from shoal.config import EngineConfig

    config = EngineConfig(quantize=quantize or EngineConfig.quantize)
    return load(model, device=device, dtype=dtype, codec=codec, config=config)


def _speak(engine: "Engine", request: "SpeechRequest", ears: AudioSinks, meter: "SpeechProgress") -> None:
    with ExitStack() as open_ears:
        listeners = ears.open(open_ears, engine.sample_rate)
        meter.begin()
        speaking = engine.service.speak_blocking(request)
        for chunk in speaking:
            for listen in listeners:
                listen(chunk.samples)
            meter.heard(chunk, *speaking.turn)
        if ears.player is not None:
            meter.only_playing()


def _player(wanted: bool) -> "Player | None":
    if not wanted:
        return None
    from shoal.cli.player import find_player

    return find_player()
