"""Flags of `shoal say`, parsed and validated before a model is loaded."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from shoal.checkpoint.find import RANDOM_PREFIX, find_directory
from shoal.cli.completion import MODELS, builtin_voices
from shoal.cli.say import flags
from shoal.errors import InvalidRequest, ModelNotFound, TextError, VoiceNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.speech import Recording, SpeechRequest, Word

STDIN = "-"
STDOUT = Path("-")
# Larger than any text limit allows, small enough to read into memory.
MAX_TEXT_BYTES = 8 << 20


def read_text_option(text: str | None, file: Path | None) -> str:
    """Return the text of the argument, of `file`, or of standard input if `text` is `-` or stdin is a pipe.

    Raises TextError if the text cannot be read or is empty, InvalidRequest if there is none or more than one.
    """
    if text not in (None, STDIN) and file is not None:
        raise InvalidRequest("give the text or --file, not both")
    if file is not None:
        content = _read_file(file)
    elif text == STDIN or (text is None and not sys.stdin.isatty()):
        content = _decode(sys.stdin.buffer, "standard input")
    elif text is None:
        raise InvalidRequest('no text to speak: give a text, shoal say "Hello."; or a file, shoal say --file a.txt')
    else:
        content = text
    if not content.strip():
        raise TextError('the text is empty; give at least one word: shoal say "Hello."')
    return content


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling of `shoal say`; None stands for the model's default."""

    seed: flags.Seed = None
    temperature: flags.Temperature = None
    top_p: flags.TopP = None
    top_k: flags.TopK = None
    repetition_penalty: flags.RepetitionPenalty = None
    repetition: flags.Repetition = None
    max_frames: flags.MaxFrames = None

    def given(self) -> dict[str, Any]:
        """Return the options that were given. Raises InvalidRequest."""
        from shoal.speech import Sampling

        return Sampling(**vars(self)).given()


@dataclass(frozen=True)
class ReadingOptions:
    """Text options of `shoal say`: normalization and SSML."""

    as_written: flags.AsWritten = False
    normalize: flags.Normalize = None
    ssml: flags.Ssml = None

    def apply(self, request: "SpeechRequest", lexicon: Path | None) -> "SpeechRequest":
        """Return the request with these options. Raises InvalidRequest for unknown or contradictory ones."""
        from shoal.speech import LANGUAGES

        for name, value in (("lexicon", lexicon), ("normalize", self.normalize)):
            if self.as_written and value is not None:
                raise InvalidRequest(f"--{name} changes the text and --as-written does not: use one of them")
        if self.normalize is not None and self.normalize not in LANGUAGES:
            raise InvalidRequest(f"--normalize must be one of {', '.join(LANGUAGES)}, not {self.normalize!r:.40}")
        return replace(request, normalize=not self.as_written, language=self.normalize, ssml=self.ssml)


def check_output(output: Path | None, format: str | None, *, json: bool) -> None:
    """Raise InvalidRequest for an output path or audio format that cannot be written."""
    from shoal.audio.formats import FORMAT_OF_SUFFIX, audio_format, format_of

    if output is None:
        if format is not None:
            raise InvalidRequest("--format needs an output file: give one with -o")
        return
    if output == STDOUT and json:
        raise InvalidRequest("-o - and --json both write to standard output: use one of them")
    if output.is_dir():
        raise InvalidRequest(f"{output} is a directory: give a file in it")
    if format is not None:
        audio_format(format)
        named = FORMAT_OF_SUFFIX.get(output.suffix.lower(), format)
        if named != format:
            raise InvalidRequest(f"{output} would contain {format}, not {named}: use another suffix, or no --format")
    elif output != STDOUT:
        format_of(output)


def check_model(name: str) -> None:
    """Raise ModelNotFound for a model that is not installed, before torch is imported to load it."""
    if name.startswith(RANDOM_PREFIX):
        known = [model for model in MODELS if model.startswith(RANDOM_PREFIX)]
        if name not in known:
            raise ModelNotFound(f"{name}: unknown size, expected one of {', '.join(known)}")
    else:
        find_directory(name)


def check_voice(name: str | None, model: str) -> None:
    """Raise VoiceNotFound for a voice that is neither stored nor built into the model."""
    if name is None:
        return
    from shoal.voices.store import VoiceStore, voice_directory

    builtin = [] if model.startswith(RANDOM_PREFIX) else [find_directory(model) / "voices"]
    known = VoiceStore(voice_directory(), builtin).exists(name)
    # An incomplete voice passes: loading it reports what is missing.
    if not known and not (voice_directory() / name).is_dir():
        raise VoiceNotFound(f"there is no voice {name!r}{_known_voices(model)}")


def _known_voices(model: str) -> str:
    names = builtin_voices(model)
    return f"; {model} has {', '.join(names)}" if names else ""


def default_seed(model: str) -> int:
    """Return the seed of a model's requests that give none."""
    from shoal.checkpoint.format.layout import read_json
    from shoal.speech import SamplingParams

    path = None if model.startswith(RANDOM_PREFIX) else find_directory(model) / "shoal.json"
    stored = read_json(path).get("sampling", {}) if path is not None and path.is_file() else {}
    return int(stored.get("seed", SamplingParams().seed))


def check_subtitles(path: Path | None) -> None:
    """Raise InvalidRequest for a subtitle file that cannot be written."""
    if path is None:
        return
    from shoal.api.subtitles import subtitle_format

    subtitle_format(path)
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidRequest(f"{path}: subtitles need a file in a directory that exists")


def write_subtitles(path: Path, words: "Sequence[Word]", speed: float) -> None:
    """Write a subtitle file in the format of its suffix, for audio at the rate `speed`. Raises OutputError."""
    from shoal.api.subtitles import scaled, subtitle_format
    from shoal.paths import atomic_write, output_errors

    with output_errors(path):
        atomic_write(path, subtitle_format(path)(scaled(words, speed)).encode())


@dataclass(frozen=True)
class VoiceOption:
    """The name of a stored voice, a reference recording, or neither."""

    name: str | None = None
    recording: "Recording | None" = None

    def request(self, text: str) -> "SpeechRequest":
        from shoal.speech import SpeechRequest

        recordings = () if self.recording is None else (self.recording,)
        return SpeechRequest(text, voice=self.name, recordings=recordings)


def parse_voice(voice: str | None, transcript: str | None) -> VoiceOption:
    """Parse --voice: a path to a file or a value with a suffix is a recording and needs a transcript; anything else
    is the name of a stored voice.

    Raises AudioError for an invalid recording, TextError for an invalid transcript, InvalidRequest if one is missing.
    """
    if transcript is None:
        if voice is not None and (Path(voice).suffix or Path(voice).is_file()):
            raise InvalidRequest("--voice with a recording needs --transcript: the words spoken in the recording")
        return VoiceOption(name=voice)
    if voice is None:
        raise InvalidRequest("--transcript needs the recording that it belongs to: give it with --voice")
    if not Path(voice).suffix and not Path(voice).exists():
        raise InvalidRequest(f"--transcript belongs to a recording, and there is no file {voice!r}: leave it out")
    from shoal.speech import Recording
    from shoal.voices.voice import DEFAULT_LIMITS, audio_bytes, check_transcript

    words = check_transcript(transcript, DEFAULT_LIMITS)
    return VoiceOption(recording=Recording(audio_bytes(Path(voice), DEFAULT_LIMITS), words))


def _read_file(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return _decode(stream, str(file))
    except OSError as problem:
        raise TextError(f"cannot read {file}: {problem.strerror}") from problem


def _decode(stream: BinaryIO, source: str) -> str:
    content = stream.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise TextError(f"{source} has more than {MAX_TEXT_BYTES >> 20} MiB of text")
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        raise TextError(f"{source} is not UTF-8 text: invalid byte at offset {problem.start}") from problem
