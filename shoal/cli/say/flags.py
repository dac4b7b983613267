"""Flags of `shoal say`."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.checkpoint.find import BUNDLED
from shoal.cli.completion import builtin_voices, complete_model, complete_voice
from shoal.cli.flags import utf8_text

Text = Annotated[
    str | None, typer.Argument(metavar="TEXT", help="Text to speak; - reads standard input.", callback=utf8_text)
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File to write; - is standard output. Default: play the audio."),
]
Play = Annotated[bool, typer.Option("--play", help="Also play the audio when writing it to a file.")]
TextFile = Annotated[Path | None, typer.Option("--file", "-f", help="Text file to speak (UTF-8).")]
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
        help=f"Voice: one of nano's ({', '.join(builtin_voices(BUNDLED))}), a stored voice, or a recording to clone "
        "(with --transcript).",
        autocompletion=complete_voice,
    ),
]
Transcript = Annotated[
    str | None, typer.Option(help="Words spoken in the recording given with --voice.", callback=utf8_text)
]
Seed = Annotated[int | None, typer.Option(help="Random seed; the same seed gives the same audio.")]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature, 0 to 2; lower varies less. Default: the model's.")
]
TopP = Annotated[
    float | None, typer.Option(help="Nucleus sampling, above 0 up to 1; lower varies less. Default: the model's.")
]
TopK = Annotated[int | None, typer.Option(help="Sample from the K likeliest tokens; 0 is all. Default: the model's.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Repetition penalty, up to 2; 1 disables it. S1 only. Default: the model's.")
]
Repetition = Annotated[
    str | None,
    typer.Option(
        help="Tokens that the repetition penalty considers: upstream (as in the release) or window (recent frames)."
    ),
]
MaxFrames = Annotated[
    int | None, typer.Option(help="Maximum frames per turn (about a sentence); 0 is as many as the context holds.")
]
Speed = Annotated[float, typer.Option(help="Speaking rate, 0.5 to 2; the pitch does not change.")]
Volume = Annotated[float, typer.Option(help="Gain in decibels, -20 to 20.")]
AsWritten = Annotated[
    bool,
    typer.Option("--as-written", help="Do not spell out numbers and symbols, even for models that expect it."),
]
Normalize = Annotated[
    str | None,
    typer.Option(
        metavar="LANGUAGE",
        help="Spell out numbers and symbols in this language (en, de or fr), for models that read many languages; "
        "en also makes nano read any text as English.",
    ),
]
Ssml = Annotated[
    bool | None,
    typer.Option("--ssml/--no-ssml", help="Read the text as SSML, or not. Default: SSML if it begins with <speak>."),
]
Subtitles = Annotated[
    Path | None,
    typer.Option(help="Also write the times of all words to this file: .srt, .vtt or .json."),
]
ShowText = Annotated[bool, typer.Option("--show-text", help="Print the text as the model reads it, without speaking.")]
Format = Annotated[
    str | None,
    typer.Option(
        help="Audio format: wav, flac, mp3, opus, aac, webm, pcm, ulaw or alaw. Default: by the suffix of --output."
    ),
]
Dtype = Annotated[str | None, typer.Option(help="Dtype: float32, bfloat16 or float16. Default: by device.")]
NoServer = Annotated[
    bool, typer.Option("--no-server", help="Load the model in this process even if a server of yours has it loaded.")
]
