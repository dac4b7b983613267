"""`shoal say`: speak a text to a file or a player."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.checkpoint.find import BUNDLED
from shoal.cli.completion import builtin_voices, complete_model, complete_voice
from shoal.cli.flags import Codec, Device, Json, Lexicon, Quantize, Quiet
from shoal.cli.prosody import ProsodyOptions
from shoal.cli.quick_exit import QuickExit
from shoal.cli.say_options import (
    check_model,
    check_output,
    check_subtitles,
    check_voice,
    default_seed,
    parse_voice,
    read_text_option,
    sampling_overrides,
    write_subtitles,
)
from shoal.errors import InvalidRequest
from shoal.gc_pause import paused_gc, resume_full_gc

if TYPE_CHECKING:
    from shoal.api.local_server import EngineIdentity
    from shoal.audio.pcm import Samples
    from shoal.cli.player import Player
    from shoal.cli.speech_progress import SpeechProgress
    from shoal.config import EngineConfig
    from shoal.engine.engine import Engine
    from shoal.speech import AudioChunk, SpeechRequest, Word

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
        help=f"Voice: one of nano's ({', '.join(builtin_voices(BUNDLED))}), a stored voice, or a recording to clone "
        "(with --transcript).",
        autocompletion=complete_voice,
    ),
]
Speed = Annotated[float, typer.Option(help="Speaking rate, 0.5 to 2; the pitch does not change.")]
Volume = Annotated[float, typer.Option(help="Gain in decibels, -20 to 20.")]
NoServer = Annotated[
    bool, typer.Option("--no-server", help="Load the model here even if a server of yours has it loaded.")
]
Repetition = Annotated[
    str | None,
    typer.Option(
        help="Tokens that the repetition penalty considers: upstream (as in the release) or window (recent frames)."
    ),
]
Subtitles = Annotated[
    Path | None,
    typer.Option(help="File for the times of all words: subtitles as .srt or .vtt, or .json."),
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
    speed: Speed = 1.0,
    volume: Volume = 0.0,
    as_written: AsWritten = False,
    ssml: Annotated[
        bool | None,
        typer.Option("--ssml/--no-ssml", help="Whether the text is SSML. Default: if it begins with <speak>."),
    ] = None,
    lexicon: Lexicon = None,
    subtitles: Subtitles = None,
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
    no_server: NoServer = False,
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
    check_subtitles(subtitles)
    check_model(model)
    check_voice(speaker.name, model)
    prosody = ProsodyOptions(speed, volume)
    if model == BUNDLED and speaker.recording is not None:
        typer.echo("note: nano hardly follows recordings; use its built-in voices, or s1-mini or s2-pro", err=True)
    sinks = AudioSinks(output, format, _player(play or output is None), prosody, subtitles)
    request = replace(speaker.request(content), normalize=not as_written, ssml=ssml, timestamps=subtitles is not None)
    no_server = no_server or request.timestamps  # its route of plain audio has no word times
    options = EngineOptions(model, codec, device, dtype, quantize, lexicon)

    from shoal.cli.speech_progress import SpeechProgress
    from shoal.cli.tables import print_json

    with SpeechProgress(shown=not quiet) as progress:
        server = None if no_server else _speak_on_server(options, request, overrides, sinks, progress, quiet=quiet)
        seed = _speak_here(options, request, overrides, sinks, progress) if server is None else server.seed
    if json:
        facts = {"model": model, "seed": seed, "server": None if server is None else server.url}
        print_json({**sinks.as_json(), **facts, **progress.as_json()})
    elif not quiet:
        typer.echo(f"{sinks}: {progress}", err=True)
    raise QuickExit


@dataclass(frozen=True)
class AudioSinks:
    """Destinations of the audio: a file, a player, or both; and of its subtitles."""

    output: Path | None
    format: str | None
    player: "Player | None"
    prosody: ProsodyOptions
    subtitles: Path | None = None

    def write(
        self, sample_rate: int, chunks: "Iterable[tuple[AudioChunk, tuple[int, int]]]", progress: "SpeechProgress"
    ) -> None:
        """Write chunks as they arrive, each with its turn and the number of turns."""
        with ExitStack() as stack:
            writers, adjust = self.open(stack, sample_rate), self.prosody.filter(sample_rate)
            words: list[Word] = []
            for chunk, turn in chunks:
                words += chunk.words
                _write(writers, adjust.feed(chunk.samples))
                progress.record(chunk, *turn)
            _write(writers, adjust.finish())
            if self.subtitles is not None:
                write_subtitles(self.subtitles, words, self.prosody.speed)
            if self.player is not None:
                progress.show_playing()

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
        found: dict[str, object] = {"output": None if self.output is None else str(self.output), "player": player}
        return found if self.subtitles is None else {**found, "subtitles": str(self.subtitles)}

    def __str__(self) -> str:
        return str(self.output) if self.output is not None else self.player.name if self.player is not None else ""


def _write(writers: "list[Callable[[Samples], None]]", samples: "Samples") -> None:
    for write in writers:
        write(samples)


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


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is loaded from."""

    model: str
    codec: Path | None
    device: str
    dtype: str | None
    quantize: str | None
    lexicon: Path | None

    @property
    def config(self) -> "EngineConfig":
        from shoal.config import EngineConfig

        return EngineConfig(quantize=self.quantize or EngineConfig.quantize)

    def identity(self) -> "EngineIdentity":
        from shoal.api.local_server import engine_identity
        from shoal.voices.store import voice_directory

        return engine_identity(
            self.model,
            voice_directory(),
            device=self.device,
            dtype=self.dtype,
            codec=self.codec,
            lexicon=self.lexicon,
            config=self.config,
        )

    def load(self) -> "Engine":
        with paused_gc():
            from shoal import load

            return load(
                self.model,
                device=self.device,
                dtype=self.dtype,
                codec=self.codec,
                config=self.config,
                lexicon=self.lexicon,
            )


@dataclass(frozen=True)
class UsedServer:
    url: str
    seed: int


def _speak_on_server(
    options: EngineOptions,
    request: "SpeechRequest",
    overrides: dict[str, Any],
    sinks: AudioSinks,
    progress: "SpeechProgress",
    *,
    quiet: bool,
) -> UsedServer | None:
    """Speak on a server of this user, and say so; None if there is none that can."""
    from shoal.api.local_server import find_server
    from shoal.cli.server_speech import ServerRefused, check_ready, speak_on_server

    server = find_server(options.identity())
    if server is None:
        return None
    seed = overrides.get("seed", default_seed(options.model))
    progress.begin()
    try:
        check_ready(server)
        speech = speak_on_server(server, request, {**overrides, "seed": seed}, sinks.prosody)
    except ConnectionError:
        return None  # it has ended
    except ServerRefused as reason:
        typer.echo(f"note: not using the server at {server.url}: {reason}", err=True)
        return None
    if not quiet:
        typer.echo(f"using the server at {server.url}; --no-server loads the model instead", err=True)
    with closing(speech):
        # The server has changed rate and volume before it rounded the samples.
        unchanged = replace(sinks, prosody=ProsodyOptions())
        unchanged.write(speech.sample_rate, ((chunk, (1, 1)) for chunk in speech.chunks()), progress)
    return UsedServer(server.url, seed)


def _speak_here(
    options: EngineOptions,
    request: "SpeechRequest",
    overrides: dict[str, Any],
    sinks: AudioSinks,
    progress: "SpeechProgress",
) -> int:
    """Load the model, speak, and return the seed."""
    try:
        with options.load() as engine:
            sampling = replace(engine.service.default_sampling, **overrides)
            progress.begin()
            speaking = engine.service.speak_blocking(replace(request, sampling=sampling))
            sinks.write(engine.sample_rate, ((chunk, speaking.turn) for chunk in speaking), progress)
        return sampling.seed
    finally:
        resume_full_gc()


def _player(wanted: bool) -> "Player | None":
    if not wanted:
        return None
    from shoal.cli.player import find_player

    return find_player()
