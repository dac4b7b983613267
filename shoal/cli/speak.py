"""Commands that speak."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.flags import Codec, Device, Json, Quiet
from shoal.cli.wishes import check_output, sampling_wishes, voice_wish, words_to_say

PANEL = "Speak"


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(say)


def say(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; - is standard output.")],
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="What to say; - is standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Say what is in this file.")] = None,
    model: Annotated[str, typer.Option(help="A directory, s1-mini, s2-pro, OWNER/NAME or random:tiny.")] = "nano",
    codec: Codec = None,
    voice: Annotated[str | None, typer.Option(help="A recording to imitate, or the name of a stored voice.")] = None,
    transcript: Annotated[str | None, typer.Option(help="What is said in that recording.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same audio.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 to 2; lower is steadier.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Up to 1; lower is steadier.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the likeliest so many; 0 is all.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Up to 2; 1 is none. S1 only.")] = None,
    repetition: Annotated[
        str | None, typer.Option(help="What the penalty looks at: upstream (as released) or window (as meant).")
    ] = None,
    max_frames: Annotated[int | None, typer.Option(help="Longest speech, in frames; 0 is what fits.")] = None,
    format: Annotated[str | None, typer.Option(help="wav, flac, mp3, opus, aac, webm, pcm; else by suffix.")] = None,
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; else what suits.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say a text into a file, written while it is made.

    Example: shoal say "Hello." -o hello.wav --model random:tiny

    Example: fortune | shoal say -o fortune.mp3 --model s1-mini --voice me.wav --transcript "What I say in me.wav."
    """
    from shoal import load
    from shoal.audio.write import AudioFile
    from shoal.cli.meter import SpeechMeter
    from shoal.cli.tables import print_json

    words, speaker = words_to_say(text, file), voice_wish(voice, transcript)
    wishes = sampling_wishes(
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        repetition=repetition,
        max_frames=max_frames,
    )
    check_output(output, format, json=json)
    with SpeechMeter(shown=not quiet) as meter, load(model, device=device, dtype=dtype, codec=codec) as engine:
        sampling = replace(engine.service.usual_sampling, **wishes)
        with AudioFile(output, engine.sample_rate, format=format) as audio:
            meter.begin()
            for chunk in engine.service.speak_blocking(speaker.request(words, sampling)):
                audio.write(chunk.samples)
                meter.heard(chunk)
    if json:
        print_json({"output": str(output), "model": model, "seed": sampling.seed, **meter.as_json()})
    elif not quiet:
        typer.echo(f"{output}: {meter}", err=True)
